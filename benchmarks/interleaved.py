"""Runs that share a machine in turns, and the seconds that each used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.completion import Completion
from benchmarks.embedded import EmbeddedCluster, PoolEntry
from benchmarks.fixtures import Fixtures
from benchmarks.stoppable_clock import StoppableClock
from cluster.config import DrafterConfig
from cluster.errors import GenerationFailed
from cluster.messages import CommitRound, SubmitRound
from cluster.transport.base import LinkDown, Mailbox, Received
from cluster.types import FinishReason, Request, RoutingTable
from drafters.protocol import Drafter
from router.planning.planner import StepPlanner

DRAFT_LEN = 7


@dataclass(frozen=True, slots=True)
class Throughput:
    """Decoded tokens, and the seconds that they took."""

    num_tokens: int
    seconds: float

    @property
    def s_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Interleaved(Protocol):
    """A run that proceeds only in its turns."""

    @property
    def has_ended(self) -> bool:
        """May raise the error that ended it."""

    @property
    def num_tokens_done(self) -> int:
        """Tokens so far of the measured answers."""

    def take_turn(self) -> None:
        """Raises the run's error."""

    def abort(self) -> None:
        """Ends the run and its requests."""


def run_interleaved(runs: Sequence[Interleaved]) -> None:
    """Runs all to their ends, one at a time. The next is always the one with the fewest tokens, so that all reach the same
    part of their answers at about the same time, and see the same noise. When one fails all are aborted, and its error is
    raised.
    """
    try:
        while under_way := [one for one in runs if not one.has_ended]:
            min(under_way, key=lambda one: one.num_tokens_done).take_turn()
    except BaseException:
        for one in runs:
            one.abort()
        raise


class Served:
    """A target with one drafter or none, in a cluster that is paused: its rounds are made in turns, on the caller's thread.

    The drafter runs on that thread, too, so both have the machine to themselves in their turn. Only drafters that read
    hidden states get a target that keeps them. Without a drafter it is the baseline. Requests come by a link instead of an
    API client, whose thread would also work in the turns of others.
    """

    def __init__(self, fixtures: Fixtures, config: DrafterConfig | None, batch: int) -> None:
        self.batch = batch
        self.drafter: Drafter | None = None
        clock = StoppableClock()
        pool: dict[str, PoolEntry] = {}
        if config is None:
            self.engine = fixtures.baseline
        else:
            self.engine = fixtures.target if config.is_colocated else fixtures.plain
            self.drafter = fixtures.make(config, clock)
            pool = {"drafter": PoolEntry(self.drafter, DRAFT_LEN, capacity=batch, companion=True)}
        table = RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),))
        self.cluster = EmbeddedCluster(self.engine, fixtures.info, fixtures.cost, pool, StepPlanner(), table, clock)
        self.cluster.pause()
        self.mailbox = Mailbox()
        self.gateway = self.cluster.connect_gateway(self.mailbox)

    def begin(
        self, requests: Sequence[Request], num_measured: int, prepare: Callable[[Sequence[Request]], None] = lambda _: None
    ) -> "InterleavedServer":
        """To serve ``requests`` in order; the run ends with the first ``num_measured``. ``prepare``: called with requests
        that begin next, before their turn."""
        return InterleavedServer(self, requests, num_measured, prepare)

    def close(self) -> None:
        self.cluster.close()


class InterleavedServer:
    """An ``Interleaved`` run of a ``Served``, which has one at a time."""

    def __init__(
        self,
        served: Served,
        requests: Sequence[Request],
        num_measured: int,
        prepare: Callable[[Sequence[Request]], None],
    ) -> None:
        if not 0 <= num_measured <= len(requests):
            raise ValueError(f"{num_measured} requests are to be measured, and there are {len(requests)}: give more prompts")
        self._prepare = prepare
        self.served = served
        self.requests = requests
        self.num_measured = num_measured
        self.completions: list[Completion] = []  # of the requests that were begun, in order
        self._live: dict[str, Completion] = {}

    @property
    def has_ended(self) -> bool:
        measured = self.completions[: self.num_measured]
        return len(measured) == self.num_measured and all(completion.has_ended for completion in measured)

    @property
    def num_tokens_done(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions[: self.num_measured])

    def take_turn(self) -> None:
        """One round, with all places taken while requests are left."""
        free = self.served.batch - len(self._live)
        begun = self.requests[len(self.completions) : len(self.completions) + free]
        for request in begun:
            self._live[request.id] = Completion()
            self.completions.append(self._live[request.id])
        if begun:
            self._prepare(begun)
            self.served.gateway.send(SubmitRound(tuple(begun)))
        self.served.cluster.work()
        now_s = self.served.cluster.clock()
        for event in self.served.mailbox.drain():
            if isinstance(event, LinkDown):
                raise RuntimeError(f"the target hung up: {event.reason}")
            if isinstance(event, Received) and isinstance(event.message, CommitRound):
                for commit in event.message.commits:
                    self._live[commit.request_id].add(commit, now_s)
                    if commit.finish is not None:
                        del self._live[commit.request_id]

    def abort(self) -> None:
        self.served.cluster.hang_up()

    def end(self) -> Throughput | None:
        """The throughput; None if nothing was decoded.

        Raises:
            GenerationFailed: a measured request failed, or the drafter failed and was removed.
        """
        completions = self.completions
        self.served.cluster.abort()
        self.served.mailbox.drain()
        for request, completion in zip(self.requests, completions[: self.num_measured], strict=False):
            last = completion.commits[-1]
            if last.finish not in (FinishReason.STOP, FinishReason.LENGTH):
                raise GenerationFailed(f"request {request.id}: {last.error or last.finish}")
        if self.served.drafter is not None:
            if "drafter" not in dict(self.served.cluster.loop.status().followed):
                raise GenerationFailed("the drafter failed; its error is in the log")
            self.served.cluster.read_mail()  # the releases
        return throughput_of(completions, self.served.batch, self.num_measured)


def throughput_of(completions: Sequence[Completion], num_alive: int, num_measured: int) -> Throughput | None:
    """Tokens of all requests, and the time in which they were committed: from when the first ``num_alive`` all have their
    first token until the first ``num_measured`` have ended. None if that is empty.

    Commits of one pass may arrive one after another; then a few of the last pass may be missing, of thousands.
    """
    measured = completions[:num_measured]
    start_s = max((completion.arrived_s[0] for completion in measured[:num_alive]), default=0.0)
    end_s = max((completion.arrived_s[-1] for completion in measured), default=0.0)
    if end_s <= start_s:
        return None
    commits = [pair for c in completions for pair in zip(c.arrived_s, c.commits, strict=True)]
    return Throughput(sum(len(commit.token_ids) for at_s, commit in commits if start_s < at_s <= end_s), end_s - start_s)
