"""When to verify (``planner.overlap``): which requests a pass takes, which wait, and what drafters draft meanwhile.

Passes take all requests at once, micro-batches in turn, or chunks while drafters draft ahead. The default, :class:`ByGain`,
takes the mode with the shortest expected round.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from router.drafting.frontiers import Frontiers
from router.drafting.overlap_gains import Pipeline
from router.drafting.verification import PassContext
from router.drafting.wait import held_until, replies_s, split_s
from router.plan import NO_PROMPTS, Frontier, PromptRows, SequenceView


@dataclass(frozen=True, slots=True)
class PassStart:
    """Which decoding requests the next pass takes."""

    ready: Sequence[SequenceView]  # it takes these; others wait for their proposal or for a later micro-batch
    held: Mapping[str, float] = field(default_factory=dict)  # request -> when it stops waiting for its proposal
    wake_s: float | None = None  # no pass now: decide again then, or when mail comes
    frontiers: Mapping[str, Frontier] = field(default_factory=dict)  # by drafter; others draft whole proposals and stop
    num_micro_batches: int = 1


class OverlapPolicy(Protocol):
    def start(self, decoding: Sequence[SequenceView], context: PassContext, prompts: PromptRows = NO_PROMPTS) -> PassStart:
        """For each plan. ``decoding``: requests without prompt tokens to compute, in order of arrival. A request is held
        for at most the maximum hold after its commit, so that a dead drafter costs no more than that."""


def in_micro_batches(decoding: Sequence[SequenceView], held: Mapping[str, float], num_micro_batches: int) -> PassStart:
    """A pass takes a share of 1/num of the requests that are drafted for, longest since their commit first, and waits until
    so many are ready. Who belongs to a micro-batch is not fixed: requests of a fast drafter come back sooner, so drafters of
    different speed need no other synchronisation. Requests without drafts take part in every pass."""
    drafted = [s for s in decoding if s.num_drafted or s.request_id in held]
    size = -(-len(drafted) // num_micro_batches)
    ready = [s for s in drafted if s.request_id not in held]
    if len(ready) < size and held:
        return PassStart((), held, min(held.values()), num_micro_batches=num_micro_batches)
    if len(ready) > size:
        ready = sorted(ready, key=lambda s: s.committed_s)[:size]
    taken = {s.request_id for s in ready}
    rest = [s for s in decoding if s.request_id in taken or not (s.num_drafted or s.request_id in held)]
    return PassStart(rest, held, num_micro_batches=num_micro_batches)


def by_gain(
    decoding: Sequence[SequenceView], held: Mapping[str, float], context: PassContext, prompts: PromptRows
) -> PassStart:
    """A pass waits for held requests while that should cost less than splitting the batch."""
    if not held:
        return PassStart(decoding)
    ready = [s for s in decoding if s.request_id not in held]
    expected_s, latest_s = replies_s(held, decoding, context.drafters)
    now_s = context.now_s
    if now_s < latest_s and expected_s < now_s + split_s(len(held), ready, decoding, context.cost, prompts):
        return PassStart(ready, held, latest_s)
    return PassStart(ready, held)


class Barrier:
    """All proposals are awaited, then one pass takes all requests (SPIN, figure 6a)."""

    def __init__(self, max_hold_s: float) -> None:
        self._max_hold_s = max_hold_s

    def start(self, decoding: Sequence[SequenceView], context: PassContext, prompts: PromptRows = NO_PROMPTS) -> PassStart:
        """Requests that await a proposal are held until the maximum hold has passed."""
        awaiting = {s.request_id: since_s + self._max_hold_s for s in decoding if (since_s := s.waits_since_s) is not None}
        held = {request_id: until_s for request_id, until_s in awaiting.items() if context.now_s < until_s}
        return in_micro_batches(decoding, held, self._num_micro_batches(decoding, context))

    def _num_micro_batches(self, decoding: Sequence[SequenceView], context: PassContext) -> int:
        return 1


class MicroBatches(Barrier):
    """The batch is cut into micro-batches, two or more: one is verified while others are drafted for (SPIN, figure 6b)."""

    def _num_micro_batches(self, decoding: Sequence[SequenceView], context: PassContext) -> int:
        return Pipeline(decoding, context.drafters, context.cost).num_micro_batches(least=2)


class ByGain:
    """A request is held for its proposal no longer than the proposal is worth (``router.drafting.wait``). Micro-batches and
    frontiers are used where measured times say that they shorten the round by more than noise."""

    always_ahead = False

    def __init__(self, max_hold_s: float) -> None:
        self._max_hold_s = max_hold_s
        self._frontiers = Frontiers(self.always_ahead)

    def __copy__(self) -> Self:
        other = type(self)(self._max_hold_s)
        other._frontiers = copy(self._frontiers)
        return other

    def start(self, decoding: Sequence[SequenceView], context: PassContext, prompts: PromptRows = NO_PROMPTS) -> PassStart:
        held = held_until(decoding, self._max_hold_s, context.value, context.now_s)
        pipeline = Pipeline(decoding, context.drafters, context.cost)
        num = 1 if self.always_ahead else pipeline.num_micro_batches()
        if num > 1:  # drafters have the other micro-batches to draft for, and need no frontier
            self._frontiers.clear()
            return in_micro_batches(decoding, held, num)
        start = by_gain(decoding, held, context, prompts)
        # A plan that waits keeps the frontiers of the last pass, or budgets would change twice a round.
        return replace(start, frontiers=self._frontiers.choose(pipeline) if start.ready else self._frontiers.present)


class FrontierAlways(ByGain):
    """Proposals are chunks; drafters go on from their own guess while a chunk is verified (FASER, 4.3)."""

    always_ahead = True
