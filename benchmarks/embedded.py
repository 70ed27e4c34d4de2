"""A whole cluster in one process: target and drafters as threads over memory:// links, the API's client in front.

The very loops that the actors run. For tests, benchmarks, notebooks, and whoever wants no Ray.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from actors.gateway import LinkClient
from actors.worker import LoopThread
from cluster.client import ClusterStatus, DrafterStatus, TargetStatus
from cluster.config import DEFAULT_CAPACITY, DEFAULT_DRAFT_LEN, Config, DraftLengthConfig
from cluster.messages import Hello, Role
from cluster.transport import connect, listen
from cluster.transport.base import Link, Mailbox
from cluster.types import Commit, ModelInfo, Request, RoutingTable
from drafters.loop import DrafterLoop
from drafters.protocol import Drafter
from drafters.sessions import SessionLimits
from engine.admission import AdmissionRules
from engine.feature_feed import FeatureFeeds
from engine.partition import Partition
from engine.round import DrafterPool, Policies, TargetLoop
from engine.target import TargetEngine
from profiler.profile import Profile, with_measured_costs
from router.cost_model import CostModel
from router.drafting.partition_choice import PartitionChoice
from router.drafting.policies import build_draft_lengths
from router.planning.planner import Planner, StepPlanner

if TYPE_CHECKING:
    from drafters.hidden_states.received import ReceivedStates
    from engine.grammar.compiling import Grammars

_numbers = itertools.count()
START_S = 10.0


@dataclass(slots=True)
class Completion:
    """What became of a request: its output, and its commits as they came."""

    token_ids: list[int] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    def add(self, commit: Commit) -> None:
        self.token_ids.extend(commit.token_ids)
        self.commits.append(commit)

    @property
    def has_ended(self) -> bool:
        return bool(self.commits) and self.commits[-1].finish is not None

    @property
    def num_proposed(self) -> int:
        return sum(commit.num_proposed for commit in self.commits)

    @property
    def num_accepted(self) -> int:
        return sum(commit.num_accepted for commit in self.commits)


@dataclass(frozen=True, slots=True)
class Completing:
    """Requests under way: what has come of each so far, and that all have ended, or why they could not."""

    completions: Sequence[Completion]
    ended: Future[None]


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A drafter and how its loop drives it.

    Args:
        companion: it shares the target's device, so it is queried only while that pays.
        proposers: names of those that may ride ahead of it, on which it may report.
        states: what it reads, if they come over a tensor link of the cluster's ``feeds``.
    """

    drafter: Drafter
    max_draft_len: int = DEFAULT_DRAFT_LEN
    capacity: int = DEFAULT_CAPACITY
    companion: bool = False
    proposers: tuple[str, ...] = ()
    max_outcomes: int = 0
    states: "ReceivedStates | None" = None


@dataclass(slots=True)
class _RunningDrafter:
    entry: PoolEntry
    loop: DrafterLoop
    mailbox: Mailbox
    link: Link
    thread: LoopThread | None  # None: it drafts on the target's thread


class EmbeddedCluster:
    """Use as a context manager. ``client`` is the EngineClient; ``complete`` is for callers without an event loop.
    ``divided``: as of ``TargetLoop.divide``. ``others``: addresses of further targets, which the client uses, too."""

    def __init__(
        self,
        engine: TargetEngine,
        model: ModelInfo,
        cost: CostModel,
        pool: Mapping[str, PoolEntry],
        planner: Planner | None = None,
        table: RoutingTable | None = None,
        grammars: "Grammars | None" = None,
        draft_length: DraftLengthConfig | None = None,
        divided: tuple[Partition, PartitionChoice] | None = None,
        feeds: FeatureFeeds | None = None,
        others: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.address = f"memory://embedded-{os.getpid()}-{next(_numbers)}"
        self.grammars = grammars
        self._tensors = "" if feeds is None else feeds.address
        self._engine = engine
        self._mailbox = Mailbox()
        table = table or RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),))
        proposers = {name: entry.proposers for name, entry in pool.items()}
        lens = {name: entry.max_draft_len for name, entry in pool.items()}
        self.loop = TargetLoop(
            engine,
            model,
            self._mailbox,
            cost,
            time.monotonic,
            Policies(planner or StepPlanner(), build_draft_lengths(draft_length or DraftLengthConfig(), lens)),
            DrafterPool(table, [name for name, entry in pool.items() if entry.companion], proposers, feeds),
            AdmissionRules(grammars=grammars),
        )
        self._listener = listen(self.address, self._mailbox, self._hello(Role.TARGET, "target"))
        self._drafters: dict[str, _RunningDrafter] = {}
        for name, entry in pool.items():
            self.start_drafter(name, entry)
        if divided is not None:
            self.loop.divide(*divided)
        self._target = LoopThread("target", self.loop.run, self._mailbox.wake, on_end=self.hang_up)
        self.client = LinkClient("embedded", model, [self.address, *others], self._status)
        if not self.client.wait_linked(START_S, 1 + len(others)):
            raise TimeoutError(f"the embedded target did not answer within {START_S} s")

    @classmethod
    def of(cls, config: Config, profile: Profile | None = None) -> Self:
        """The cluster of a resolved configuration, without its router: every drafter in turn.

        Args:
            profile: as of ``engine.loading.load_target``.

        Raises:
            OutriderError: a model is missing, or does not fit; says which.
        """
        from drafters.hidden_states.host import Host
        from drafters.registry import feature_layers, make_drafter
        from engine.cpu_setup import in_own_thread
        from engine.loading import load_target
        from engine.models.prepare import ensure_model
        from engine.target import LoadedTarget

        config = config if profile is None else with_measured_costs(config, profile)
        companions = [drafter for drafter in config.drafters if drafter.is_colocated]

        def load() -> tuple[LoadedTarget, ModelInfo, CostModel, dict[str, PoolEntry]]:
            folder = ensure_model(config.model.name)
            engine, model, cost = load_target(config, feature_layers(companions, folder), profile)
            host = Host(engine, folder)
            pool = {
                drafter.name: PoolEntry(
                    make_drafter(drafter, model, host, proposers=config.proposers_of(drafter.name)),
                    drafter.max_draft_len,
                    drafter.capacity,
                    drafter.is_colocated,
                    tuple(below.name for below in config.proposers_of(drafter.name)),
                    drafter.num_outcomes,
                )
                for drafter in config.drafters
            }
            return engine, model, cost, pool

        engine, model, cost, pool = in_own_thread(load)
        return cls(
            engine,
            model,
            cost,
            pool,
            StepPlanner.of(config),
            RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),)),
            grammars=engine.grammars,
            draft_length=config.planner.draft_length,
        )

    def hang_up(self) -> None:
        """Whoever waits for an answer gets LinkClosed, and so does who asks for another. Drafters are unlinked, too."""
        self._listener.close()

    def start_drafter(self, name: str, entry: PoolEntry) -> None:
        """Also takes the place of a drafter of that name."""
        loop, mailbox = _loop(name, entry)
        if entry.states is not None:
            from drafters.hidden_states.received import StateCalls

            loop.sessions.linked = StateCalls(name, entry.states, mailbox).linked
        link = connect(self.address, mailbox, self._hello(Role.DRAFTER, name))
        thread = None
        if entry.companion:
            self.loop.inline.add(loop, link.close)
        else:
            run = partial(loop.run, clock=time.monotonic)
            thread = LoopThread(f"drafter-{name}", run, mailbox.wake, on_end=link.close)
        self._drafters[name] = _RunningDrafter(entry, loop, mailbox, link, thread)

    def kill_drafter(self, name: str) -> None:
        """It goes without a word, as a crashed process does: the link breaks, what it followed is forgotten."""
        drafter = self._drafters.pop(name)
        drafter.link.close()
        self.loop.inline.remove(name)
        if drafter.thread is not None:
            drafter.thread.stop()

    def complete(self, requests: Sequence[Request], num_alive: int | None = None) -> list[Completion]:
        """Runs the requests to their ends, in an event loop of its own.

        Args:
            num_alive: so many at a time, in order, each that ends giving its place to the next; else all together.

        Raises:
            LinkClosed, Overloaded: as ``LinkClient.generate``.
        """
        completing = self.begin(requests, num_alive)
        completing.ended.result()
        return list(completing.completions)

    def begin(self, requests: Sequence[Request], num_alive: int | None = None) -> Completing:
        """``complete`` for who does something else meanwhile, on a thread that lasts until all have ended or ``hang_up``."""
        completions = [Completion() for _ in requests]
        pending = iter(list(zip(requests, completions, strict=True)))

        async def place() -> None:
            for request, completion in pending:
                async with aclosing(self.client.generate(request)) as commits:
                    async for commit in commits:
                        completion.add(commit)

        async def run() -> None:
            await asyncio.gather(*(place() for _ in requests[:num_alive]))

        executor = ThreadPoolExecutor(1, thread_name_prefix="completing")
        ended = executor.submit(lambda: asyncio.run(run()))
        executor.shutdown(wait=False)
        return Completing(completions, ended)

    @property
    def num_resumed(self) -> int:
        """Requests that went on at another target."""
        return asyncio.run(self.client.status()).num_resumed

    def close(self) -> None:
        """Raises RuntimeError: the target's loop, or an observation of it, has failed meanwhile; the log has the error."""
        asyncio.run(self.client.close())
        self._target.stop()
        self.hang_up()
        for name in tuple(self._drafters):
            self.kill_drafter(name)
        end = self._target.wait_end()
        if end != "stopped":
            raise RuntimeError(f"the embedded target failed: {end}")
        if self.loop.telemetry.num_failed_observations:
            raise RuntimeError("observations of rounds failed; the log shows the first")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _status(self) -> ClusterStatus:
        status, telemetry, capacity = self.loop.status(), self.loop.telemetry, self._engine.capacity()
        followed = dict(status.followed)
        target = TargetStatus(
            "target",
            "draining" if status.draining else "ready",
            status.num_running,
            status.num_waiting,
            capacity.num_blocks,
            capacity.num_free_blocks,
            telemetry.tokens_per_s,
            1e3 * telemetry.step_s.value,
            telemetry.num_preempted,
        )
        drafters = []
        for name, running in self._drafters.items():
            stats = telemetry.drafter(name)
            drafters.append(
                DrafterStatus(
                    name,
                    type(running.entry.drafter).__name__,
                    "ready" if name in followed else "down",
                    followed.get(name, 0),
                    stats.num_proposed,
                    stats.num_accepted,
                    1e3 * stats.reply_s.value if stats.reply_s.num else None,
                )
            )
        return ClusterStatus(self.model.name, "fixed", status.table_version, (target,), tuple(drafters))

    def _hello(self, role: Role, name: str) -> Hello:
        tensors = self._tensors if role is Role.TARGET else ""
        return Hello(role, name, self.model.vocab_size, self.model.tokenizer_fingerprint, tensors=tensors)


def _loop(name: str, entry: PoolEntry) -> tuple[DrafterLoop, Mailbox]:
    mailbox = Mailbox()
    limits = SessionLimits(entry.capacity, entry.max_draft_len, max_outcomes=entry.max_outcomes)
    spare_share = 0.0 if entry.companion else 1.0  # as `actors.colocated_drafters`: on the target's device no time is spare
    return DrafterLoop(name, entry.drafter, mailbox, limits, spare_share=spare_share), mailbox
