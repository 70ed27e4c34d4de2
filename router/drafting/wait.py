"""How long a request waits for its proposal, and how long a pass waits for requests that do."""

from collections.abc import Iterable, Mapping, Sequence

from router.cost_model import CostModel
from router.drafting.verification import VerifyContext
from router.plan import NO_PROMPTS, UNKNOWN_DRAFTER, DrafterView, PromptRows, SequenceView

# Minimum hold, in one-row steps: without it an estimate of zero accepted tokens could never recover.
MIN_HOLD_STEPS = 0.05


def held_until(decoding: Iterable[SequenceView], max_hold_s: float, context: VerifyContext) -> dict[str, float]:
    """Which requests wait for their proposal, and until when: at most the time that its accepted tokens would save."""
    held = {}
    for sequence in decoding:
        since_s = sequence.waits_since_s
        if sequence.drafter is None or since_s is None:
            continue
        drafter = context.drafters.get(sequence.drafter, UNKNOWN_DRAFTER)
        gain = max(drafter.accepted_per_round, MIN_HOLD_STEPS)
        hold_s = min(max_hold_s, gain * context.cost.step_s(1, sequence.committed_len))
        if drafter.reply_s <= hold_s and context.now_s < since_s + hold_s:
            held[sequence.request_id] = since_s + hold_s
    return held


def batch_held_until(
    decoding: Iterable[SequenceView],
    drafters: Mapping[str, DrafterView],
    expected: Mapping[str, float],
    max_hold_s: float,
    tokens_per_s: float,
) -> dict[str, float]:
    """As ``held_until``, where a pass takes all requests or none: those that await proposals gain the tokens that these
    bring beyond ``expected`` ones of other drafts, and all lose what is decoded meanwhile."""
    awaited = [one for one in decoding if one.drafter and one.waits_since_s is not None]
    views = [drafters.get(one.drafter or "", UNKNOWN_DRAFTER) for one in awaited]
    gains = (view.accepted_per_round - expected.get(one.request_id, 0.0) for one, view in zip(awaited, views, strict=True))
    hold_s = min(max_hold_s, sum([max(0.0, gain) for gain in gains]) / tokens_per_s)
    in_time = zip(awaited, views, strict=True)
    held = {one.request_id: (one.waits_since_s or 0.0) + hold_s for one, view in in_time if view.reply_s <= hold_s}
    return dict.fromkeys(held, replies_s(held, awaited, drafters)[1])


def replies_s(
    held: Mapping[str, float], decoding: Iterable[SequenceView], drafters: Mapping[str, DrafterView]
) -> tuple[float, float]:
    """When the last awaited proposal should be there, and until when it is waited for: after the usual time of its drafter,
    and after twice that, within the hold. Drafters that draft ahead reply at once or after a whole draft, and what is still
    awaited is of the second kind."""
    expected_s = latest_s = 0.0
    for sequence in decoding:
        if sequence.request_id in held and sequence.drafter and sequence.awaiting_since_s is not None:
            drafter, since_s = drafters.get(sequence.drafter, UNKNOWN_DRAFTER), sequence.awaiting_since_s
            expected_s = max(expected_s, since_s + drafter.reply_s)
            longest_s = 2 * max(drafter.reply_s, drafter.draft_s)
            latest_s = max(latest_s, min(since_s + longest_s, held[sequence.request_id]))
    return expected_s, latest_s


def split_s(
    num_held: int,
    ready: Sequence[SequenceView],
    decoding: Sequence[SequenceView],
    cost: CostModel,
    prompts: PromptRows = NO_PROMPTS,
) -> float:
    """How much longer passes take if held sequences are verified in the next one: the longest that ready ones wait for them.
    Where prompts fill both passes, that is next to nothing."""
    context = sum(s.committed_len for s in decoding)

    def pass_s(num_rows: int) -> float:
        return cost.step_s(num_rows, context) if num_rows else 0.0

    apart_s = pass_s(max(len(ready) + prompts.now, 1)) + pass_s(num_held + prompts.next)
    return apart_s - pass_s(len(decoding) + prompts.now) - pass_s(prompts.next)
