"""Writes the answers of /v1/messages: Anthropic's message, and its events."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from cluster.types import FinishReason
from deploy.api.answer import Answer, Event, PartsWriter, acceptance_of, call_id, named_event, usage_of
from deploy.api.answer_parts import Arguments, CallStart, Part, Reasoning, Text
from deploy.api.anthropic_fields import MessagesRequest
from deploy.api.errors import ApiError

# Clients drop reasoning without a signature from what they send back. Nothing reads this one.
_SIGNATURE = "unsigned"


class AnthropicWriter(PartsWriter):
    """Parts become blocks of the content."""

    def __init__(self, fields: MessagesRequest, answer: Answer) -> None:
        super().__init__(answer)
        self._head = {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model}
        self._fields = fields
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the last block, a call
        self._is_open = False  # the last block

    def _whole(self) -> Event:
        return {**self._head, "content": self._blocks, **self._stop(), **self._counts()}

    def _opening(self) -> Sequence[Event]:
        unknown = {"stop_reason": None, "stop_sequence": None}
        message: Event = {**self._head, "content": [], **unknown, "usage": {**self._usage(), "output_tokens": 0}}
        return {"type": "message_start", "message": message}, {"type": "ping"}

    def closing(self) -> bytes:
        return named_event({"type": "message_delta", "delta": self._stop(), **self._counts()}) + named_event(
            {"type": "message_stop"}
        )

    def error(self, error: ApiError) -> bytes:
        return named_event(error.anthropic_body())

    def _stop(self) -> dict[str, str | None]:
        choice = self._choice
        stop_string = choice.stop_string
        if choice.finish is FinishReason.LENGTH:
            is_shortened = self._fields.max_tokens > choice.request.sampling.max_tokens
            reason = "model_context_window_exceeded" if is_shortened else "max_tokens"
        elif choice.num_calls and not choice.ends_in_call:
            reason, stop_string = "tool_use", None
        else:
            reason = "end_turn" if stop_string is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_string}

    def _counts(self) -> dict[str, Any]:
        return {"usage": self._usage(), "outrider": acceptance_of([self._choice])}

    def _usage(self) -> dict[str, Any]:
        """``input_tokens`` are those that the prefix cache did not hold."""
        usage: dict[str, Any] = usage_of([self._choice])
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }

    # ---- blocks

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Text(text):
                yield from self._begin({"type": "text", "text": ""})
                self._blocks[-1]["text"] += text
                yield self._delta(type="text_delta", text=text)
            case Reasoning(text):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += text
                yield self._delta(type="thinking_delta", thinking=text)
            case CallStart(name=name):
                yield from self._end()
                yield from self._begin({"type": "tool_use", "id": call_id(self._choice, part), "name": name, "input": {}})
            case Arguments(_, text):
                self._arguments += text
                yield self._delta(type="input_json_delta", partial_json=text)

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begins a block, unless the last one is of its type and goes on."""
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return
        yield from self._end()
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _end(self, finish: FinishReason | None = None) -> Iterator[Event]:
        """Of the last block, if it goes on."""
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta(type="signature_delta", signature=_SIGNATURE)
        elif block["type"] == "tool_use":
            block["input"], self._arguments = _input_of(self._arguments), ""
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, **delta: str) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _input_of(arguments: str) -> dict[str, Any]:
    """The object that the arguments of a call spell. Those that are none, or cut off, are one field ``INVALID_JSON``."""
    try:
        found = from_json(arguments or "{}", allow_inf_nan=False)
        json.dumps(found, allow_nan=False)  # fails for numbers beyond floats
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
