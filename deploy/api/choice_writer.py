"""Writes the answers of chat and completions: one document, or server-sent events."""

from collections.abc import Sequence

from deploy.api.answer import Envelope, encode_json, metrics_of, segments_json, total_counts, usage_of
from deploy.api.choice import Choice, Delta
from deploy.api.errors import ApiError
from deploy.api.formats import AnswerFormat
from deploy.api.sse import DONE


class ChoiceWriter:
    """``deploy.api.call.AnswerWriter`` for answers that are lists of choices."""

    def __init__(
        self,
        choices: Sequence[Choice],
        form: AnswerFormat,
        envelope: Envelope,
        *,
        include_usage: bool,
        continuous_usage: bool,
        drafting_details: bool,
    ) -> None:
        self._choices = choices
        self._format = form
        self._envelope = envelope
        self._include_usage = include_usage
        self._continuous_usage = include_usage and continuous_usage
        self._drafting_details = drafting_details
        self._num_unfinished = len(choices)

    def document(self, deltas: Sequence[Delta]) -> bytes:
        whole = [self._format.whole(choice, delta) for choice, delta in zip(self._choices, deltas, strict=True)]
        outrider = self._acceptance()
        if self._drafting_details:
            outrider["segments"] = [segments_json(delta) for delta in deltas]
        root = {**self._format.root(self._choices), **metrics_of(self._choices)}
        fields = {"choices": whole, "usage": usage_of(self._choices), "outrider": outrider, **root}
        return self._envelope.document(fields)

    def opening(self) -> bytes:
        openings = [self._format.opening(choice) for choice in self._choices]
        root = self._format.root(self._choices)
        usage = self._usage_so_far()
        return b"".join(self._envelope.event([opening], usage=usage, **root) for opening in openings if opening is not None)

    def events(self, batch: Sequence[tuple[Choice, Delta]]) -> bytes:
        events = []
        for choice, delta in batch:
            self._num_unfinished -= delta.finish is not None
            outrider: dict[str, object] = {}
            if self._drafting_details:
                outrider["segments"] = segments_json(delta)
            if self._num_unfinished == 0 and not self._include_usage:
                outrider |= self._acceptance()
            chunk, usage = self._format.chunk(choice, delta), self._usage_so_far()
            events.append(self._envelope.event([chunk], usage=usage, outrider=outrider or None))
        return b"".join(events)

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        fields = {"outrider": self._acceptance(), **metrics_of(self._choices)}
        return self._envelope.event([], usage=usage_of(self._choices), **fields) + DONE

    def error(self, error: ApiError) -> bytes:
        return f"data: {encode_json(error.body())}\n\n".encode() + DONE

    def _usage_so_far(self) -> dict[str, object] | None:
        return usage_of(self._choices) if self._continuous_usage else None

    def _acceptance(self) -> dict[str, object]:
        return {"acceptance": total_counts(self._choices).as_json()}
