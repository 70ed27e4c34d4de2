"""A draft token is accepted exactly when it equals the target's own (DESIGN idea 1). This is all of it."""

from collections.abc import Sequence

from engine.sampling import Chosen
from engine.target import SpanOutcome


def count_accepted(drafts: Sequence[int], chosen: Chosen) -> int:
    """How many draft tokens, from the first on, equal the tokens chosen at their positions."""
    num_accepted = 0
    for draft_id, chosen_id in zip(drafts, chosen.token_ids, strict=False):
        if draft_id != chosen_id:
            break
        num_accepted += 1
    return num_accepted


def verdict(request_id: str, drafts: Sequence[int], chosen: Chosen) -> SpanOutcome:
    """What the target says to ``drafts``, given what it chose at each of the len(drafts) + 1 rows.

    A row that could not be sampled counts only if it is reached: behind a rejected draft token it means nothing.
    """
    num_accepted = count_accepted(drafts, chosen)
    num_tokens = min(num_accepted + 1, len(chosen.token_ids))
    return SpanOutcome(
        request_id,
        chosen.token_ids[:num_tokens],
        num_accepted,
        chosen.logprobs[:num_tokens],
        error=chosen.error if num_tokens == num_accepted else None,
    )
