"""The process of a target replica: an engine with its TargetLoop on a thread, and the reports on it. Of a target of several
ranks, the processes of the others, and all of them as one process."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.processes import Process
from actors.worker import LoopActor, LoopThread, ProcessInfo, set_threads
from cluster.client import TargetStatus
from cluster.config import Config
from cluster.counts import NO_DRAFTS, DraftingCounts
from cluster.cpu_scheduling import run_in_foreground
from cluster.messages import Hello, Role
from cluster.types import ModelInfo, RoutingTable
from engine.cpu_setup import configure_cpu
from engine.mailbox import MonitoredMailbox
from router.drafter.chains import pass_times
from router.drafter.router import SlotReport
from router.scaling.configured import CostTables
from router.scaling.report import NOTHING_SERVED, ServedCounts

if TYPE_CHECKING:
    from engine.feature_feed import FeatureFeeds
    from engine.tensor_parallel.group import Rendezvous
    from engine.tensor_parallel.ranks import RankGroup
    from engine.tensor_parallel.rounds import Follower


@dataclass(frozen=True, slots=True)
class TargetInfo(ProcessInfo):
    """What other processes need to link to a target."""

    name: str
    address: str
    model: ModelInfo
    draining: bool = False


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """A target's counts of one drafter since the target's start."""

    name: str
    num_requests: int  # drafted for now
    num_proposed: int
    num_accepted: int
    reply_s: float | None
    num_unsound: int = 0  # messages that were partly or wholly rejected
    drafts: DraftingCounts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class TargetReport:
    """Input of the cluster's status."""

    status: TargetStatus
    drafters: tuple[DrafterCounts, ...] = ()
    table_version: int = 0
    named: Mapping[str, int] = field(default_factory=dict)  # requests that name the drafter in `drafting`
    served: ServedCounts = NOTHING_SERVED


class TargetActor(LoopActor):
    """Every method may be called from any thread; ``report``, ``cost_tables`` and ``drain`` only after ``start``, which
    loads the model.

    Args:
        node_host: returns the host at which other nodes reach this one, for an ``address`` at ``node`` or of all interfaces.
    """

    def __init__(
        self, config: Config, name: str, address: str, token: str, node_host: Callable[[], str] = lambda: "127.0.0.1"
    ) -> None:
        super().__init__(config.observability)
        run_in_foreground()
        self._config, self._name, self._address, self._token, self._node_host = config, name, address, token, node_host
        self._mailbox = MonitoredMailbox()
        self._rendezvous: Rendezvous | None = None  # of a target of several ranks

    def rendezvous(self) -> str:
        """Where the other ranks of this target join it, before ``start``."""
        if self._rendezvous is None:
            set_threads(self._config.target.resources.threads)
            from engine.tensor_parallel.group import Rendezvous

            host, wait_s = host_of_ranks(self._config, self._node_host), self._config.supervision.start_timeout_s
            self._rendezvous = Rendezvous(host, wait_s)
        return self._rendezvous.address

    def _join_ranks(self) -> "RankGroup | None":
        if self._rendezvous is None:
            return None
        from engine.tensor_parallel.group import join

        target, host = self._config.target, host_of_ranks(self._config, self._node_host)
        return join(self._rendezvous.store, 0, target.tensor_parallel, str(target.device), host)

    def _start_loop(self) -> LoopThread:
        config, name = self._config, self._name
        set_threads(config.target.resources.threads)
        configure_cpu()
        from actors.colocated_drafters import divide, link_colocated, load_with_colocated
        from cluster.spans import open_spans
        from cluster.transport import at_node, listen
        from drafters.draft_spans import DraftSpans
        from engine.admission import AdmissionRules
        from engine.cpu_setup import in_own_thread
        from engine.loading import stored_profile
        from engine.request_spans import RequestSpans
        from engine.round import DrafterPool, Policies, TargetLoop
        from profiler.profile import pool_costs
        from router.drafter.policies import member_costs
        from router.drafting.policies import draft_lengths_of
        from router.planning.planner import StepPlanner

        profile = stored_profile(config)
        self._engine, self._model, cost, colocated = in_own_thread(
            lambda: load_with_colocated(config, profile, True, self._join_ranks())
        )
        self._draft_costs: Callable[[], Mapping[str, float]] = lambda: pool_costs(config, cost)
        self._member_costs = member_costs(config, cost)
        self._cost = cost
        self._feeds = self._feature_feeds()
        self._loop = TargetLoop(
            self._engine,
            self._model,
            self._mailbox,
            cost,
            time.monotonic,
            Policies(StepPlanner.of(config), draft_lengths_of(config)),
            DrafterPool(
                first_table(config),
                [drafter.name for drafter in colocated],
                {one.name: [below.name for below in config.proposers_of(one.name)] for one in config.drafters},
                self._feeds,
            ),
            AdmissionRules(grammars=self._engine.grammars, sheds=config.slo.shed),
        )
        spans = open_spans(config.observability, name)
        if spans is not None:
            self._loop.observer.spans = RequestSpans(spans, name)
            for drafter in colocated:
                drafter.loop.sessions.spans = DraftSpans(spans, drafter.name)
        model, instance = self._model, secrets.token_hex(8)
        at = "" if self._feeds is None else self._feeds.address
        hello = Hello(
            Role.TARGET, name, model.vocab_size, model.tokenizer_fingerprint, self._token, instance=instance, tensors=at
        )
        link_colocated(colocated, self._loop, hello)
        divide(config, self._loop, self._engine, profile, colocated)
        self._listener = listen(at_node(self._address, self._node_host()), self._mailbox, hello, tls=config.cluster.tls)

        def on_end() -> None:
            self._listener.close()  # links end with the loop, so that no peer waits for this target
            if self._feeds is not None:
                self._feeds.close()
            if spans is not None:
                spans.close()

        return LoopThread(f"target {name}", self._loop.run, self._mailbox.wake, on_end=on_end)

    def _feature_feeds(self) -> "FeatureFeeds | None":
        """For the drafters in other processes that read hidden states; None: there are none."""
        from drafters.registry import feature_layers
        from engine.feature_feed import FeatureFeeds
        from engine.models.prepare import ensure_model

        remote = [drafter for drafter in self._config.drafters if drafter.remote]
        folder = ensure_model(self._config.model.name, engine=self._config.target.engine)
        layers = {drafter.name: feature_layers([drafter], folder) for drafter in remote}
        host = host_of_ranks(self._config, self._node_host)
        return FeatureFeeds(self._engine, layers, host) if remote else None

    def _info(self) -> TargetInfo:
        from cluster.transport import as_seen_from_elsewhere

        address = as_seen_from_elsewhere(self._listener.address, self._node_host())
        return TargetInfo(os.getpid(), self._name, address, self._model, self._loop.status().draining)

    def stalled_s(self) -> float:
        return self._mailbox.stalled_s()

    def publish_table(self, table: RoutingTable) -> None:
        """Dropped before ``start`` has ended; the next report tells the router."""
        if self.is_started:
            self._loop.publish_table(table)

    def slot_report(self) -> SlotReport | None:
        """None before ``start`` has ended: the router finds this actor by name while it loads its model."""
        if not self.is_started:
            return None
        status, requests = self._loop.status(), self._loop.requests()
        return SlotReport(
            requests=requests,
            observations=self._loop.telemetry.take_observations(),
            table_version=status.table_version,
            drafters=tuple(name for name, _ in status.followed),
            draft_costs=self._draft_costs(),
            member_costs=self._member_costs,
            scores=self._loop.telemetry.take_scores(),
            levels=self._loop.telemetry.take_levels(),
            target_passes=pass_times(self._cost, sum(request.committed_len for request in requests)),
        )

    def report(self) -> TargetReport:
        status, telemetry = self._loop.status(), self._loop.telemetry
        followed = dict(status.followed)
        target = self._config.target
        return TargetReport(
            status=TargetStatus(
                name=self._name,
                state="draining" if status.draining else "ready",
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                num_blocks=self._engine.capacity().num_blocks,
                num_free_blocks=status.num_free_blocks,
                tokens_per_s=telemetry.tokens_per_s,
                step_ms=1e3 * telemetry.step_s.value,
                num_preempted=telemetry.num_preempted,
                num_prompt_tokens=telemetry.num_prompt_tokens,
                num_cached_tokens=telemetry.num_cached_tokens,
                num_failed_observations=telemetry.num_failed_observations,
                slo=telemetry.attainment.counts(),
                riders=followed,
                drafting=self._loop.drafting(),
                rounds_s=telemetry.rounds_s.snapshot(),
                rows=telemetry.rows.snapshot(),
                batch=telemetry.batch.snapshot(),
                num_cpus=target.tensor_parallel * target.resources.reserved[0],
                num_gpus=target.tensor_parallel * target.resources.reserved[1],
            ),
            drafters=tuple(
                DrafterCounts(
                    name=name,
                    num_requests=followed.get(name, 0),
                    num_proposed=one.num_proposed,
                    num_accepted=one.num_accepted,
                    reply_s=one.reply_s.or_none,
                    num_unsound=one.num_unsound,
                    drafts=one.counts(),
                )
                for name, one in tuple(telemetry.drafters.items())
            ),
            table_version=status.table_version,
            named=self._loop.named(),
            served=telemetry.served,
        )

    def cost_tables(self) -> CostTables:
        """For decisions about numbers of replicas; only after ``start``."""
        return CostTables.of(self._cost, self._member_costs)

    def drain(self, drains: bool = True) -> None:
        """Accept no more requests but those of a lost target, or accept them again."""
        self._loop.drain(drains)


def first_table(config: Config) -> RoutingTable:
    """The table until the router publishes one: requests are given to the drafters in turn."""
    chains = tuple((drafter.name,) for drafter in config.drafters)
    return RoutingTable(version=0, defaults=chains or ((),))


def host_of_ranks(config: Config, node_host: Callable[[], str]) -> str:
    """The address at which this rank's machine is reached by the others: loopback if there is only one."""
    return "127.0.0.1" if config.transport.kind == "unix" else node_host()


class RankActor(LoopActor):
    """Rank ``rank`` of a target. Every method may be called from any thread."""

    def __init__(self, config: Config, rank: int, node_host: Callable[[], str]) -> None:
        super().__init__(config.observability)
        run_in_foreground()
        self._config, self._rank, self._node_host = config, rank, node_host
        self._address = ""
        self._follower: Follower | None = None

    def follow(self, address: str) -> ProcessInfo:
        """As ``start``, for the rank 0 that waits at ``address``: loads the rank's shard and joins."""
        self._address = address
        return self.start()

    def _start_loop(self) -> LoopThread:
        config = self._config
        set_threads(config.target.resources.threads)
        configure_cpu()
        from engine.cpu_setup import in_own_thread
        from engine.loading import load_follower
        from engine.tensor_parallel.group import join, meet

        store = meet(self._address, config.supervision.start_timeout_s)
        num_ranks, device = config.target.tensor_parallel, str(config.target.device)
        ranks = join(store, self._rank, num_ranks, device, host_of_ranks(config, self._node_host))
        follower = self._follower = in_own_thread(lambda: load_follower(config, ranks))
        return LoopThread(f"rank {self._rank}", lambda stop: follower.run(), wake=lambda: None)

    def stalled_s(self) -> float:
        return 0.0 if self._follower is None else self._follower.stalled_s()


class RankProcesses:
    """``actors.processes.Process`` of all ranks. It ends when the first of them does, and is killed as one."""

    def __init__(self, first: Process, others: Sequence[Process]) -> None:
        self._first = first
        self._others = tuple(others)

    @property
    def name(self) -> str:
        return self._first.name

    async def ended(self) -> str:
        ends = {asyncio.ensure_future(one.ended()): rank for rank, one in enumerate((self._first, *self._others))}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(f"rank {ends[end]}: {end.result()}" for end in done)
        finally:
            for end in ends:
                end.cancel()

    async def stalled_s(self) -> float:
        return max(await asyncio.gather(*(one.stalled_s() for one in (self._first, *self._others))))

    async def call(self, method: str, *args: Any) -> Any:
        """Rank 0 answers. ``start`` starts all of them."""
        if method != "start":
            return await self._first.call(method, *args)
        address = await self._first.call("rendezvous")
        following = (other.call("follow", address) for other in self._others)
        info, *_ = await asyncio.gather(self._first.call("start"), *following)
        return info

    async def kill(self) -> None:
        await asyncio.gather(*(one.kill() for one in (self._first, *self._others)))
