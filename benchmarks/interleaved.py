"""Requests served by a target and a drafter in turns with others, and the seconds that they took of their own."""

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Protocol

from benchmarks.embedded import Completing, Completion, EmbeddedCluster, PoolEntry, StoppableClock
from benchmarks.fixtures import Fixtures
from cluster.config import DrafterConfig
from cluster.errors import GenerationFailed
from cluster.types import FinishReason, Request, RoutingTable
from drafters.protocol import Drafter
from drafters.session import key_of
from router.planner import StepPlanner

DRAFT_LEN = 7
TURN_S = 0.5  # some passes of a large batch; and much less than bursts of other tenants, of some ten seconds


@dataclass(frozen=True, slots=True)
class Pace:
    """Decoded tokens, and the seconds that they took."""

    num_tokens: int
    seconds: float

    @property
    def s_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Lane(Protocol):
    """Requests that are served while it has its turn."""

    @property
    def has_ended(self) -> bool:
        """Raises what ended it, if that was an error."""

    @property
    def num_told(self) -> int:
        """Tokens of the answers that are measured."""

    def take_turn(self, turn_s: float) -> None:
        """Serves for so long, or until all has ended.

        Raises:
            RuntimeError: it has failed.
        """

    def give_up(self) -> None:
        """Serves nobody any more, who waits for it hears so."""


def side_by_side(lanes: Sequence[Lane]) -> None:
    """Until all have ended. The machine is one's at a time, for TURN_S, and next is always the one that has told fewest
    tokens: they come to the same places of their answers at about the same time, and meet there what else the machine does.

    Raises:
        OutriderError, RuntimeError: one has failed; then all give up.
    """
    try:
        while under_way := [one for one in lanes if not one.has_ended]:
            min(under_way, key=lambda one: one.num_told).take_turn(TURN_S)
    except BaseException:
        for one in lanes:
            one.give_up()
        raise


class Served:
    """A target with one drafter, or none, in a cluster that rests between turns.

    The drafter runs on the target's thread, so both have the machine to themselves in turn. The target keeps its hidden
    states where the drafter reads them, and is the plain one for all others. Without a drafter it is their rival.
    """

    def __init__(self, stable: Fixtures, config: DrafterConfig | None, batch: int) -> None:
        self.batch = batch
        self.drafter: Drafter | None = None
        clock = StoppableClock()
        pool: dict[str, PoolEntry] = {}
        if config is None:
            self.engine = stable.rival
        else:
            self.engine = stable.target if config.is_companion else stable.plain
            self.drafter = stable.make(config, clock)
            pool = {"drafter": PoolEntry(self.drafter, DRAFT_LEN, capacity=batch, companion=True)}
        table = RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),))
        self.cluster = EmbeddedCluster(self.engine, stable.info, stable.cost, pool, StepPlanner(), table, clock)
        self.cluster.pause()

    def begin(self, requests: Sequence[Request], num_measured: int) -> "ServedLane":
        """``requests`` in order, until the first ``num_measured`` have ended."""
        return ServedLane(self, requests, num_measured, self.cluster.begin(requests, self.batch, num_measured))

    def close(self) -> None:
        self.cluster.close()


@dataclass(frozen=True, slots=True)
class ServedLane:
    """``Lane`` of one who serves; it has one at a time, until its ``end``."""

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
    def num_told(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completing.completions[: self.num_measured])

    def take_turn(self, turn_s: float) -> None:
        self.served.cluster.resume()
        wait([self.completing.ended], turn_s)
        self.served.cluster.pause()

    def give_up(self) -> None:
        self.served.cluster.hang_up()

    def end(self) -> Pace | None:
        """None: nobody was decoding.

        Raises:
            GenerationFailed: one of those measured failed, or the drafter did and was left out.
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
            for request in self.requests:  # the last word of the target may not have come before its end
                self.served.drafter.release(key_of(0, request.id))
        return pace_of(completions, self.served.batch, self.num_measured)


def pace_of(completions: Sequence[Completion], num_alive: int, num_measured: int) -> Pace | None:
    """Tokens, and the seconds in which they were committed: from when the first ``num_alive`` all have their first token
    until the last of the first ``num_measured`` ends, whoever decodes then. None where nobody did.

    Commits of one pass arrive one after another, so a few of the last pass may be left out, of thousands.
    """
    measured = completions[:num_measured]
    start_s = max((completion.arrived_s[0] for completion in measured[:num_alive]), default=0.0)
    end_s = max((completion.arrived_s[-1] for completion in measured), default=0.0)
    if end_s <= start_s:
        return None
    commits = [pair for c in completions for pair in zip(c.arrived_s, c.commits, strict=True)]
    return Pace(sum(len(commit.token_ids) for at_s, commit in commits if start_s < at_s <= end_s), end_s - start_s)
