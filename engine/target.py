"""The interface between the round and the engine that computes the target's tokens."""

from collections.abc import Sequence
from typing import Protocol

from cluster.fast_dataclass import record
from cluster.types import Request, TokenLogprobs
from router.plan import Capacity


@record
class SpanInput:
    """Tokens of one sequence to compute in a pass.

        base_len .. base_len + len(token_ids)         the positions computed
                            \\- the last num_drafts of them are draft tokens

    ``samples``: the span reaches the last committed token, and the target's own token is wanted at each of the last
    ``num_drafts + 1`` rows. A span that does not sample is a prefill chunk, and has no drafts.
    """

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    samples: bool = True


@record
class SpanOutcome:
    """The accepted draft tokens of a span, then the target's own next one. Empty for a prefill chunk, or if nothing ran.
    ``error``: no token could be chosen; the request ends. ``computed_len``: tokens in the cache, where no token was chosen
    and the engine schedules for itself; None: the span was computed."""

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    computed_len: int | None = None


class TargetEngine(Protocol):
    """Computes the target's tokens. Not thread-safe: the round owns it. The token at a position depends on (target, prompt,
    parameters, seed) alone (DESIGN idea 1): not on drafts, the batch or preemptions."""

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        """Admits a request whose committed tokens are ``token_ids`` (more than the prompt after a preemption). Returns how
        many of them the prefix cache holds: at most len - 1."""

    def execute(self, spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        """One packed pass. Rolls back rejected draft tokens, and returns when the device has finished: callers time it.
        Raises OutOfBlocks: the spans need more blocks than are free; nothing was computed."""

    def release(self, request_id: str) -> None:
        """Frees the KV blocks of a finished, aborted or preempted request. Unknown requests are ignored."""

    def capacity(self) -> Capacity: ...

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks and sequences disagree."""
