"""What the writers of answers share: ids, usage, drafting counts, and server-sent events."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import to_json

from cluster.types import PREDICTION, FinishReason
from deploy.api.answer_parts import CallStart, Part, Text
from deploy.api.choice import Choice, Delta
from deploy.api.draft_counts import DraftingCounts
from deploy.api.tokenizer import Tokenizer

Event = dict[str, Any]

# Over plain dicts, which this encoder writes several times faster than json.dumps. A number that is none is null.
encode_json = partial(to_json, inf_nan_mode="null")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be written. ``fingerprint``: of what answers with equal seeds depend on."""

    id: str
    model: str
    fingerprint: str
    choices: Sequence[Choice]
    tokenizer: Tokenizer


class PartsWriter(ABC):
    """``deploy.api.call.AnswerWriter`` for one choice, whose parts become items of the answer: content, reasoning, calls."""

    def __init__(self, answer: Answer) -> None:
        (self._choice,) = answer.choices
        self._is_begun = False

    def document(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            for _ in self._take(delta):
                continue
        return encode_json(self._whole())

    def events(self, batch: Sequence[tuple[Choice, Delta]]) -> bytes:
        events = [] if self._is_begun else list(map(self._event, self._opening()))
        self._is_begun = True
        return b"".join([*events, *(self._event(event) for _, delta in batch for event in self._take(delta))])

    def _take(self, delta: Delta) -> Iterator[Event]:
        """Adds new parts to the items. The events that tell of them."""
        parts = delta.parts
        if self._choice.options.new_parser is None:
            parts = (Text(delta.text),) if delta.text else ()
        for part in parts:
            yield from self._add(part)
        if delta.finish is not None:
            yield from self._end(delta.finish)

    def _event(self, event: Event) -> bytes:
        return named_event(event)

    @abstractmethod
    def _whole(self) -> Event:
        """The answer that is not streamed."""

    @abstractmethod
    def _opening(self) -> Iterable[Event]:
        """The events before those of the first part."""

    @abstractmethod
    def _add(self, part: Part) -> Iterator[Event]: ...

    @abstractmethod
    def _end(self, finish: FinishReason) -> Iterator[Event]:
        """Of the last item."""


def named_event(event: Mapping[str, object]) -> bytes:
    """A server-sent event that is named by its type."""
    return f"event: {event['type']}\ndata: ".encode() + encode_json(event) + b"\n\n"


def call_id(choice: Choice, call: CallStart) -> str:
    """The model's id of a tool call, or a new one with letters and digits at its end: Mistral's templates ask for nine."""
    if call.id is not None:
        return call.id
    digest = hashlib.sha256(f"{choice.request.id} {call.index}".encode()).hexdigest()
    return digest[:9] if choice.options.short_ids else f"call_{digest[:24]}"


def usage_of(choices: Sequence[Choice]) -> dict[str, object]:
    """OpenAI's usage object. It counts each prompt, and its hits in the prefix cache, once for all its choices."""
    num_tokens = sum(choice.num_tokens for choice in choices)
    firsts = [choice for choice in choices if choice.counts_prompt]
    num_prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in firsts)
    num_cached_tokens = sum(choice.prefill.num_cached_tokens for choice in firsts if choice.prefill is not None)
    counts = total_counts(choices)
    if any(choice.request.prediction_token_ids for choice in choices):  # else all drafts count
        counts = counts.by_drafter.get(PREDICTION, DraftingCounts())
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": counts.num_accepted,
            "rejected_prediction_tokens": counts.num_proposed - counts.num_accepted,
        },
    }


def acceptance_of(choices: Sequence[Choice]) -> dict[str, object]:
    """The fields below ``outrider`` of every answer."""
    return {"acceptance": total_counts(choices).as_json()}


def total_counts(choices: Sequence[Choice]) -> DraftingCounts:
    total = DraftingCounts()
    for choice in choices:
        total.merge(choice.counts)
    return total
