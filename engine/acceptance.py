"""Acceptance of draft tokens: one is accepted exactly when it equals the target's own token (DESIGN idea 1). No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.target import SpanOutcome

if TYPE_CHECKING:
    from engine.sampling import Chosen


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    num = min(len(a), len(b))
    if a[:num] == b[:num]:  # the usual case, fast
        return num
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), num)


def verdict(request_id: str, drafts: Sequence[int], chosen: "Chosen") -> SpanOutcome:
    """Verifies ``drafts`` by the tokens that the target chose at each of the len(drafts) + 1 rows.

    A row that could not be sampled is an error only if it is reached, not behind a rejected draft token.
    """
    num_accepted = common_prefix_len(drafts, chosen.token_ids)
    num_tokens = min(num_accepted + 1, len(chosen.token_ids))
    return SpanOutcome(
        request_id,
        chosen.token_ids[:num_tokens],
        num_accepted,
        chosen.logprobs[:num_tokens],
        error=chosen.error if num_tokens == num_accepted else None,
    )
