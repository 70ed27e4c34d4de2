"""A running request as the gateway follows it: the commits on their way from a link's thread to the caller's event loop."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.errors import LinkClosed, OutriderError, Overloaded, Unattainable
from cluster.message_checks import commit_fault
from cluster.transport.base import Link
from cluster.types import Commit, FinishReason, Slo

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A stream has lost its target. ``suspects``: as of ``Resumption.note_death``."""

    reason: str
    suspects: Mapping[str, int]

    @property
    def error(self) -> LinkClosed:
        return LinkClosed(f"{self.reason}; send the request again")


STOPS = Loss("the server stops", {})


@dataclass(slots=True, eq=False)
class RequestStream:
    """Its queue is bounded by the request's max_tokens."""

    loop: asyncio.AbstractEventLoop
    link: Link
    next_len: int | None  # committed length at which the next commit begins; None after the last
    end_len: int  # committed length at max_tokens
    num_fruitless: int  # of `Resumption`, until its first token here
    blocks: Sequence[int]  # of its prompt, as of `router.target_choice`
    num_known: int  # of these when it was sent
    num_computed: int = 0  # tokens of prompt and output, by this target
    commits: asyncio.Queue[Commit | Loss] = field(default_factory=asyncio.Queue)

    def advance(self, commit: Commit, vocab_size: int) -> str | None:
        """Moves on to the next commit. Returns why ``commit`` is unsound or does not continue the stream, which ends it."""
        end_len = commit.base_len + len(commit.token_ids)
        fault = commit_fault(commit, vocab_size)
        if fault is None and commit.base_len != self.next_len:
            fault = f"a commit at {commit.base_len} after {self.next_len} committed tokens"
        elif fault is None and end_len > self.end_len:
            fault = f"{end_len - self.end_len} tokens more than the request allows"
        if fault is None and commit.finish is not FinishReason.ABORT and commit.token_ids:
            self.num_fruitless = 0
            self.num_computed += len(commit.token_ids)
        if fault is None and commit.prefill is not None and commit.token_ids:
            self.num_computed += commit.base_len - commit.prefill.num_cached_tokens
        self.next_len = None if fault is not None or commit.finish is not None else end_len
        return fault


def deliver(loop: asyncio.AbstractEventLoop, items: Iterable[tuple[RequestStream, Commit | Loss]]) -> None:
    """With one wake-up of ``loop``. From any thread."""

    def put() -> None:
        for stream, item in items:
            stream.commits.put_nowait(item)

    if not loop.is_closed():
        loop.call_soon_threadsafe(put)


def is_refusal(commit: Commit) -> bool:
    """Whether another target may take the request."""
    return commit.finish in (FinishReason.OVERLOADED, FinishReason.DRAINING)


def refusal_error(commit: Commit, slo: Slo) -> OutriderError:
    """What a caller is told when no target takes its request, of which ``commit`` is the refusal."""
    reason = commit.error or "the target takes no more requests"
    if commit.finish is FinishReason.DRAINING:
        return LinkClosed(reason)
    if commit.prefill is None or slo.ttft_s is None:
        return Overloaded(reason, RETRY_AFTER_S)
    excess_s = commit.prefill.queue_s + commit.prefill.prefill_s - slo.ttft_s
    return Unattainable(reason, max(RETRY_AFTER_S, excess_s))
