"""The seam between the round and whatever computes the target's tokens."""

from collections.abc import Sequence
from typing import Protocol

from cluster.records import record
from cluster.types import Request, TokenLogprobs
from router.plan import Capacity


@record
class SpanInput:
    """Tokens of one sequence to compute in this pass.

        base_len .. base_len + len(token_ids)         the positions computed
                            \\- the last num_drafts of them are draft tokens

    ``samples``: the span reaches the end of what is committed, so the target's own token is wanted at each of the last
    ``num_drafts + 1`` rows. A span that does not sample is a prefill chunk and has no drafts.
    """

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    samples: bool = True

    @property
    def is_decode(self) -> bool:
        """Whether it holds the newest committed token and drafts, and of a prompt no more than its last token."""
        return self.samples and len(self.token_ids) == 1 + self.num_drafts


@record
class SpanOutcome:
    """The target's verdict on a span: the accepted draft tokens, then its own next one. Empty for a prefill chunk.

    ``error``: no token could be chosen for this sequence (its logits hold no number, say); it cannot go on.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class TargetEngine(Protocol):
    """Computes the target's tokens. Not thread-safe: the round owns it.

    The token at a position is a function of (target, prompt, parameters, seed) alone (DESIGN idea 1), whatever the
    drafts, the batch, or what was preempted before.
    """

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        """Start to hold a request whose committed tokens are ``token_ids`` (more than the prompt after a preemption).

        Returns how many of them need not be computed, because a cached prefix covers them: at most len - 1.
        """

    def execute(self, spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        """One packed pass. Draft tokens that were not accepted are rolled back before it returns.

        It returns after the device has finished the pass: callers time it, and learn from that what passes cost.

        Raises:
            OutOfBlocks: the spans need more blocks than are free; nothing was computed.
        """

    def release(self, request_id: str) -> None:
        """Free what a request holds: finished, aborted or preempted. Unknown requests are ignored."""

    def capacity(self) -> Capacity: ...

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks and sequences disagree."""
