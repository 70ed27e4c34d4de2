"""Speculation in lock-step: draft, then verify, then draft; of all at once, or of micro-batches in turn."""

from collections.abc import Sequence

from router.drafting.verification import PassContext
from router.plan import SequenceView, StepPlan
from router.planning.planner import Planner

_LONGEST_S = 60.0


class LockStep(Planner):
    """Another planner's plans, of those micro-batches all of whose proposals have come.

    Requests are dealt to ``num_micro_batches`` in the order of their coming. With one, the target idles while drafters draft
    (SPIN, figure 6a); with several, it verifies the one while others are drafted, and each is still verified once a round
    (figure 6b).
    """

    def __init__(self, planner: Planner, num_micro_batches: int = 1) -> None:
        self._planner = planner
        self._num = num_micro_batches

    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        until_s: dict[int, float] = {}  # of micro-batches that wait
        for number, sequence in enumerate(sequences):
            if sequence.running and sequence.awaiting_since_s is not None and not sequence.num_drafted:
                until_s[number % self._num] = max(
                    until_s.get(number % self._num, 0.0), sequence.awaiting_since_s + _LONGEST_S
                )
        waiting = {group: until for group, until in until_s.items() if until > context.now_s}
        ready = [sequence for number, sequence in enumerate(sequences) if number % self._num not in waiting]
        if ready:
            return self._planner.plan(ready, context)
        held = {sequence.request_id: waiting[number % self._num] for number, sequence in enumerate(sequences)}
        return StepPlan(spans=(), held=held, wake_s=min(waiting.values()))
