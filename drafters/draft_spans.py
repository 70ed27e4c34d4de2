"""Spans of the traced requests that a drafter drafts for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.messages import Open
from cluster.spans import MAX_EVENTS, Attributes, FinishedSpan, SpanEvent, SpanSink


@dataclass(slots=True)
class _Drafts:
    """Of one session."""

    trace: str
    request_id: str
    first_s: float | None = None  # when the first batch began
    last_s: float = 0.0
    busy_s: float = 0.0  # of batches, which other requests share
    num_batches: int = 0
    num_tokens: int = 0
    events: list[SpanEvent] = field(default_factory=list)


class DraftSpans:
    """``draft``: from the first batch of drafts for a request to the last one, with an event for each of the first
    MAX_EVENTS. Sessions that only keep in step have none. The loop owns it."""

    def __init__(self, sink: SpanSink, drafter: str) -> None:
        self._sink, self._drafter = sink, drafter
        self._live: dict[str, _Drafts] = {}  # by key of the session
        self._batch: Sequence[tuple[str, int]] = ()

    def opened(self, key: str, opening: Open) -> None:
        if opening.trace:
            self._live[key] = _Drafts(opening.trace, opening.request_id)

    def note_batch(self, batch: Sequence[tuple[str, int]]) -> None:
        """What is drafted now: keys and numbers of tokens. Keys of other outcomes of a verification do not count."""
        self._batch = batch

    def drafted(self, began_s: float, now_s: float) -> None:
        """The noted batch took this time."""
        for key, num_tokens in self._batch:
            if (drafts := self._live.get(key)) is None:
                continue
            drafts.first_s = began_s if drafts.first_s is None else drafts.first_s
            drafts.last_s = now_s
            drafts.busy_s += now_s - began_s
            drafts.num_batches += 1
            drafts.num_tokens += num_tokens
            if len(drafts.events) < MAX_EVENTS:
                of_batch = {"outrider.drafted_tokens": num_tokens, "outrider.batch_requests": len(self._batch)}
                drafts.events.append(SpanEvent("batch", now_s, of_batch))
        self._batch = ()

    def closed(self, key: str) -> None:
        drafts = self._live.pop(key, None)
        if drafts is not None and drafts.first_s is not None:
            attributes: Attributes = {
                "outrider.drafter": self._drafter,
                "outrider.request_id": drafts.request_id,
                "outrider.batches": drafts.num_batches,
                "outrider.drafted_tokens": drafts.num_tokens,
                "outrider.batches_s": drafts.busy_s,
            }
            times = drafts.first_s, drafts.last_s
            self._sink.add(FinishedSpan("draft", drafts.trace, *times, attributes, tuple(drafts.events)))
