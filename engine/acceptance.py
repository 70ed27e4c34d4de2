"""Acceptance: a draft token is accepted exactly when it equals the target's own (docs/architecture.md#principles). No torch.

``accept`` verifies within a pass; ``judge`` compares a whole proposal with what was committed, for the drafter's statistics.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.types import Proposal
from router.estimates.drafter_stats import Judgement
from router.plan import Span

if TYPE_CHECKING:
    from engine.sampling import Chosen


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    num_same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        num_same += 1
    return num_same


def accept(span: Span, drafts: Sequence[int], chosen: "Chosen") -> None:
    """Verifies ``drafts`` of a span by the tokens that the target chose at each of the len(drafts) + 1 rows. A row that
    could not be sampled is an error only if it is reached, not behind a rejected draft token."""
    num_accepted = common_prefix_len(drafts, chosen.token_ids)
    num_tokens = min(num_accepted + 1, len(chosen.token_ids))
    span.chosen, span.num_accepted = chosen.token_ids[:num_tokens], num_accepted
    span.logprobs = chosen.logprobs[:num_tokens]
    if num_tokens == num_accepted:
        span.error, span.is_refused = chosen.error, chosen.is_refused


def judge(proposal: Proposal, committed: Sequence[int], num_overtaken: int = 0) -> Judgement:
    """Compares a proposal with the tokens committed from its base on, its unverified tokens included. ``num_overtaken``:
    as of ``Judgement``."""
    drafts = proposal.token_ids
    num_right = common_prefix_len(drafts, committed)
    num_judged = min(num_right + 1, len(drafts), len(committed))
    return Judgement(proposal.drafter, proposal.confidences[:num_judged], num_right, proposal.unfinished, num_overtaken)
