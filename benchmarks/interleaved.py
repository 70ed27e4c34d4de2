"""Runs that share a machine in turns, and the seconds that each used."""

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Protocol

from benchmarks.embedded import Completing, Completion, EmbeddedCluster, PoolEntry
from benchmarks.fixtures import Fixtures
from benchmarks.stoppable_clock import StoppableClock
from cluster.config import DrafterConfig
from cluster.errors import GenerationFailed
from cluster.types import FinishReason, Request, RoutingTable
from drafters.protocol import Drafter
from router.planner import StepPlanner

DRAFT_LEN = 7
TURN_S = 0.5  # several passes of a large batch, and shorter than bursts of noise


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
        """Raises the error that ended it."""

    @property
    def num_tokens_done(self) -> int:
        """Tokens so far of the measured answers."""

    def take_turn(self, turn_s: float) -> None:
        """Runs for ``turn_s``, or until its end.

        Raises:
            RuntimeError: it has failed.
        """

    def abort(self) -> None:
        """Ends the run and its requests."""


def run_interleaved(runs: Sequence[Interleaved]) -> None:
    """Runs all to their ends, one at a time for TURN_S. The next is always the one with the fewest tokens, so that all
    reach the same part of their answers at about the same time, and see the same noise.

    Raises:
        OutriderError, RuntimeError: one has failed; then all are aborted.
    """
    try:
        while under_way := [one for one in runs if not one.has_ended]:
            min(under_way, key=lambda one: one.num_tokens_done).take_turn(TURN_S)
    except BaseException:
        for one in runs:
            one.abort()
        raise


class Served:
    """A target with one drafter or none, in a cluster that is paused between turns.

    The drafter runs on the target's thread, so both have the machine to themselves in their turn. Only drafters that
    read hidden states get a target that keeps them. Without a drafter it is the baseline.
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

    def begin(self, requests: Sequence[Request], num_measured: int) -> "InterleavedServer":
        """Starts ``requests`` in order; the run ends with the first ``num_measured``."""
        return InterleavedServer(self, requests, num_measured, self.cluster.begin(requests, self.batch, num_measured))

    def close(self) -> None:
        self.cluster.close()


@dataclass(frozen=True, slots=True)
class InterleavedServer:
    """An ``Interleaved`` run of a ``Served``, which has one at a time."""

    served: Served
    requests: Sequence[Request]
    num_measured: int
    completing: Completing

    @property
    def has_ended(self) -> bool:
        if self.completing.ended.done():
            self.completing.ended.result()
        return self.completing.ended.done()

    @property
    def num_tokens_done(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completing.completions[: self.num_measured])

    def take_turn(self, turn_s: float) -> None:
        self.served.cluster.resume()
        wait([self.completing.ended], turn_s)
        self.served.cluster.pause()

    def abort(self) -> None:
        self.served.cluster.hang_up()

    def end(self) -> Throughput | None:
        """The throughput; None if nothing was decoded.

        Raises:
            GenerationFailed: a measured request failed, or the drafter failed and was removed.
        """
        completions = self.completing.completions
        self.served.cluster.abort()
        for request, completion in zip(self.requests[: self.num_measured], completions, strict=False):
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

    Commits of one pass arrive one after another, so a few of the last pass may be missing, of thousands.
    """
    measured = completions[:num_measured]
    start_s = max((completion.arrived_s[0] for completion in measured[:num_alive]), default=0.0)
    end_s = max((completion.arrived_s[-1] for completion in measured), default=0.0)
    if end_s <= start_s:
        return None
    commits = [pair for c in completions for pair in zip(c.arrived_s, c.commits, strict=True)]
    return Throughput(sum(len(commit.token_ids) for at_s, commit in commits if start_s < at_s <= end_s), end_s - start_s)
