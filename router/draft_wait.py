"""How long a request waits for its proposal, and how long a pass waits for requests that do."""

from collections.abc import Iterable, Mapping, Sequence

from router.cost_model import CostModel
from router.plan import UNKNOWN_DRAFTER, DrafterView, SequenceView

# Minimum hold, in one-row steps: without it an estimate of zero accepted tokens could never recover.
MIN_HOLD_STEPS = 0.05


def held_until(
    decoding: Iterable[SequenceView], drafters: Mapping[str, DrafterView], max_hold_s: float, cost: CostModel, now_s: float
) -> dict[str, float]:
    """Which requests wait for their proposal, and until when: at most the time that its accepted tokens would save."""
    held = {}
    for sequence in decoding:
        if sequence.drafter is None or sequence.awaiting_since_s is None:
            continue
        if sequence.num_drafted or sequence.max_new_tokens == 1:  # it has drafts, or could use none
            continue
        drafter = drafters.get(sequence.drafter, UNKNOWN_DRAFTER)
        gain = max(drafter.accepted_per_round, MIN_HOLD_STEPS)
        hold_s = min(max_hold_s, gain * cost.step_s(1, sequence.committed_len))
        until_s = sequence.awaiting_since_s + hold_s
        if drafter.reply_s <= hold_s and now_s < until_s:
            held[sequence.request_id] = until_s
    return held


def due_s(held: Mapping[str, float], decoding: Iterable[SequenceView], drafters: Mapping[str, DrafterView]) -> float:
    """When the last awaited proposal should be there: after twice its drafter's usual time, within the hold."""
    latest_s = 0.0
    for sequence in decoding:
        if sequence.request_id in held and sequence.drafter and sequence.awaiting_since_s is not None:
            reply_s = drafters.get(sequence.drafter, UNKNOWN_DRAFTER).reply_s
            latest_s = max(latest_s, min(sequence.awaiting_since_s + 2 * reply_s, held[sequence.request_id]))
    return latest_s


def split_s(num_held: int, ready: Sequence[SequenceView], decoding: Sequence[SequenceView], cost: CostModel) -> float:
    """How much longer two passes take than one: the longest that ready sequences wait for held ones."""
    context = sum(s.committed_len for s in decoding)
    apart_s = cost.step_s(max(len(ready), 1), context) + cost.step_s(num_held, context)
    return apart_s - cost.step_s(len(decoding), context)
