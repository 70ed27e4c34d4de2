"""How long a request waits for its proposal, and how long a pass waits for requests that do."""

from collections.abc import Iterable, Mapping, Sequence

from router.cost_model import CostModel
from router.drafting.value import DraftingValue
from router.plan import NO_PROMPTS, UNKNOWN_DRAFTER, DrafterView, PromptRows, SequenceView


def held_until(decoding: Iterable[SequenceView], max_hold_s: float, value: DraftingValue, now_s: float) -> dict[str, float]:
    """Which requests wait for their proposal, and until when: at most as long as it is worth."""
    held = {}
    for sequence in decoding:
        since_s = sequence.waits_since_s
        if sequence.drafter is None or since_s is None:
            continue
        hold_s = min(max_hold_s, value.worth_s(sequence.drafter, sequence.committed_len))
        if value.view(sequence.drafter).reply_s <= hold_s and now_s < since_s + hold_s:
            held[sequence.request_id] = since_s + hold_s
    return held


def batch_held_until(
    decoding: Iterable[SequenceView], value: DraftingValue, expected: Mapping[str, float], max_hold_s: float
) -> dict[str, float]:
    """As ``held_until``, where a pass takes all requests or none: those that await proposals gain the tokens that these
    bring beyond ``expected`` ones of other drafts, and all lose what is decoded meanwhile."""
    awaited = [one for one in decoding if one.drafter and one.waits_since_s is not None]
    others = {one.request_id: (one.drafter or "", expected.get(one.request_id, 0.0)) for one in awaited}
    hold_s = min(max_hold_s, value.all_worth_s(others))
    held = {
        one.request_id: (one.waits_since_s or 0.0) + hold_s
        for one in awaited
        if value.view(one.drafter or "").reply_s <= hold_s
    }
    return dict.fromkeys(held, replies_s(held, awaited, value.drafters)[1])


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
