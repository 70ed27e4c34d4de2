"""What service-level objectives change in draft budgets (`router/planning/slo.py`).

- A row of a request that falls behind costs it less, by its weight, and costs the others more: rows cost what they did on
  average. So its drafts are longer, and theirs end earlier.
- No draft makes a round that awaits it longer than every stream can bear, on average, for the tokens that it commits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.types import DraftTerms
from router.drafting.value import expected_tokens
from router.plan import SequenceView
from router.planning.slo import Stream

_WEIGHT_STEPS = 4  # in each unit: a row price that changes is a message


def weighted(
    budgets: Mapping[str, DraftTerms],
    drafted: Sequence[SequenceView],
    weights: Mapping[str, float],
    longest: Mapping[str, int],
) -> dict[str, DraftTerms]:
    """Budgets of the decoding requests ``drafted`` by weight and drafter, others as they are. Equal ones are one object.

    Args:
        weights: of requests that fall behind, above 1.
        longest: the most draft tokens of a drafter; others are not limited.
    """
    found, changed = dict(budgets), dict[tuple[DraftTerms, float, int], DraftTerms]()
    steps = {request_id: round(_WEIGHT_STEPS * weight) for request_id, weight in weights.items()}
    total = sum([steps.get(sequence.request_id, _WEIGHT_STEPS) for sequence in drafted])
    mean = round(total / max(1, len(drafted)))  # in steps, too: else each change would be one of all prices
    for sequence in drafted:
        budget, drafter = budgets[sequence.request_id], sequence.drafter
        if drafter is None or not budget.num_tokens:
            continue
        num_tokens = min(budget.num_tokens, longest.get(drafter, budget.num_tokens))
        weight = steps.get(sequence.request_id, _WEIGHT_STEPS) / mean
        one = changed.get((budget, weight, num_tokens))
        if one is None:
            row_price = min(1.0, budget.row_price / weight)
            one = changed[budget, weight, num_tokens] = replace(budget, num_tokens=num_tokens, row_price=row_price)
        found[sequence.request_id] = one
    return found


def longest_draft(
    streams: Iterable[Stream], acceptance_of: Callable[[str], float], round_s: Callable[[int], float], max_len: int
) -> int:
    """The most draft tokens, up to ``max_len``, with which no stream falls behind on average, but for those that do at any
    length. At least 1: what streams cannot bear may cost others the length of their drafts, but not the drafts.

    Args:
        acceptance_of: probability that a draft token of a request is right; 0 without drafts.
        round_s: time of a round that awaits drafts of so many tokens.
    """
    seconds = [round_s(length) for length in range(max_len + 1)]
    longest = max_len
    for stream in streams:
        acceptance = acceptance_of(stream.request_id)
        bearable = (n for n in range(longest, -1, -1) if seconds[n] <= stream.round_s(expected_tokens(acceptance, n)))
        longest = max(1, next(bearable, longest))
    return longest
