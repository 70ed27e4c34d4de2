"""Acceptance of draft tokens: one is accepted exactly when it equals the target's own token (DESIGN idea 1)."""

from collections.abc import Sequence

from engine.sampling import Chosen
from engine.target import SpanOutcome


def count_accepted(drafts: Sequence[int], chosen: Chosen) -> int:
    """The length of the draft's prefix that equals the chosen tokens."""
    num_accepted = 0
    for draft_id, chosen_id in zip(drafts, chosen.token_ids, strict=False):
        if draft_id != chosen_id:
            break
        num_accepted += 1
    return num_accepted


def verdict(request_id: str, drafts: Sequence[int], chosen: Chosen) -> SpanOutcome:
    """Verifies ``drafts`` by the tokens that the target chose at each of the len(drafts) + 1 rows.

    A row that could not be sampled is an error only if it is reached, not behind a rejected draft token.
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
