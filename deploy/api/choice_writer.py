"""JSON of chat and completion choices."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, ClassVar

from cluster.types import FinishReason, TokenLogprobs
from deploy.api.answer import Answer, acceptance_of, call_id, encode_json, usage_of
from deploy.api.answer_parts import Arguments, CallStart, Reasoning, Text
from deploy.api.call import DONE
from deploy.api.choice import Choice, Delta, OutputToken
from deploy.api.errors import ApiError
from deploy.api.schema import GenerationFields, StreamOptions

_LOWEST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


class ChoiceWriter(ABC):
    """``deploy.api.call.AnswerWriter`` for answers that are lists of choices."""

    _kind: ClassVar[str]  # of a whole answer
    _chunk_kind: ClassVar[str]

    def __init__(self, fields: GenerationFields, answer: Answer) -> None:
        self._answer = answer
        options = fields.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = self._include_usage and bool(options.continuous_usage_stats)
        self._drafting_details = bool(fields.drafting_details)
        self._num_unfinished = len(answer.choices)
        self._begun: set[int] = set()  # choices, by their indices
        common = {
            "id": answer.id,
            "object": self._chunk_kind if fields.stream else self._kind,
            "created": int(time.time()),
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
        }
        self._head = encode_json(common)[:-1]  # of the answer, or of all chunks

    def document(self, deltas: Sequence[Delta]) -> bytes:
        choices = self._answer.choices
        whole = [self._whole(choice, delta) for choice, delta in zip(choices, deltas, strict=True)]
        outrider = acceptance_of(choices)
        if self._drafting_details:
            outrider["segments"] = [list(map(asdict, delta.segments)) for delta in deltas]
        fields = {"choices": whole, "usage": usage_of(choices), "outrider": outrider, **self._root(), **self._metrics()}
        return self._object(fields)

    def events(self, batch: Sequence[tuple[Choice, Delta]]) -> bytes:
        events = []
        for choice, delta in batch:
            if choice.index not in self._begun:  # only now the log-probabilities of its prompt are known
                self._begun.add(choice.index)
                if (opening := self._opening(choice)) is not None:
                    events.append(self._event(opening, **self._root()))
            self._num_unfinished -= delta.finish is not None
            outrider: dict[str, object] = {}
            if self._drafting_details:
                outrider["segments"] = list(map(asdict, delta.segments))
            if self._num_unfinished == 0 and not self._include_usage:
                outrider |= acceptance_of(self._answer.choices)
            events.append(self._event(self._chunk(choice, delta), **({"outrider": outrider} if outrider else {})))
        return b"".join(events)

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        choices = self._answer.choices
        last = {"choices": [], "usage": usage_of(choices), "outrider": acceptance_of(choices), **self._metrics()}
        return b"data: " + self._object(last) + b"\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + encode_json(error.body()) + b"\n\n" + DONE

    def _event(self, choice: dict[str, object], **fields: object) -> bytes:
        """One server-sent event."""
        usage = usage_of(self._answer.choices) if self._continuous_usage else None
        usages = {"usage": usage} if self._include_usage else {}  # as in OpenAI's API: null in all chunks but the last
        return b"data: " + self._object({"choices": [choice], **usages, **fields}) + b"\n\n"

    def _object(self, fields: dict[str, object]) -> bytes:
        return self._head + b"," + encode_json(fields)[1:]

    def _metrics(self) -> dict[str, object]:
        """vLLM's ``metrics``, which describe one sequence: empty for a call with several."""
        choices = self._answer.choices
        return {"metrics": {"speculative_decoding": choices[0].counts.speculative_decoding()}} if len(choices) == 1 else {}

    def _root(self) -> dict[str, object]:
        """Fields beside ``choices``, in the whole answer or the first chunk of a choice."""
        return {}

    @abstractmethod
    def _opening(self, choice: Choice) -> dict[str, object] | None:
        """The first chunk of a choice's stream, if there is one before its text."""

    @abstractmethod
    def _chunk(self, choice: Choice, delta: Delta) -> dict[str, object]: ...

    @abstractmethod
    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]: ...

    @abstractmethod
    def _logprobs_of(self, choice: Choice, tokens: Sequence[OutputToken]) -> dict[str, object]: ...

    def _prompt_logprobs(self, choice: Choice) -> dict[str, object]:
        """vLLM's ``prompt_logprobs``: null for the first token, then by token id, the prompt's own first. The rows are made
        while they are encoded, so that other threads run between them."""
        if choice.request.sampling.prompt_logprobs is None or not choice.options.prompt_logprobs:
            return {}
        ids = choice.request.prompt_token_ids[1:]
        rows = (self._ranked(token_id, found) for token_id, found in zip(ids, choice.prompt_logprobs, strict=True))
        return {"prompt_logprobs": chain([None], rows)}

    def _ranked(self, token_id: int, found: TokenLogprobs) -> dict[str, object]:
        top = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(found.top, start=1) if top_id != token_id]
        return {
            str(one): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._answer.tokenizer.token_name(one)}
            for one, logprob, rank in ((token_id, found.logprob, found.rank), *top)
        }

    def _ending(self, choice: Choice, delta: Delta) -> dict[str, object]:
        """The fields after the text of a choice or chunk."""
        asked = choice.request.sampling.top_logprobs is not None
        calls = choice.num_calls and not choice.ends_in_call and delta.finish is FinishReason.STOP
        return {
            "logprobs": self._logprobs_of(choice, delta.tokens) if asked else None,
            "finish_reason": "tool_calls" if calls else delta.finish,
            **({} if delta.finish is None else {"stop_reason": choice.stop_reason}),
            **({"token_ids": [token.id for token in delta.tokens]} if choice.options.token_ids else {}),
        }


class ChatWriter(ChoiceWriter):
    """OpenAI's chat format."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def _opening(self, choice: Choice) -> dict[str, object] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _root(self) -> dict[str, object]:
        first = self._answer.choices[0]
        return _prompt_token_ids(first) | self._prompt_logprobs(first)

    def _chunk(self, choice: Choice, delta: Delta) -> dict[str, object]:
        content: dict[str, object] = {"content": delta.text} if delta.text else {}
        if choice.options.new_parser is not None:
            content = self._parsed(choice, delta)
        return {"index": choice.index, "delta": content, **self._ending(choice, delta)}

    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": delta.text, "refusal": None}
        if choice.options.new_parser is not None:
            parsed = self._parsed(choice, delta)
            for call in parsed.get("tool_calls", ()):
                del call["index"]
            message |= {"content": None if parsed else "", **parsed}
        return {"index": choice.index, "message": message, **self._ending(choice, delta)}

    def _parsed(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The fields ``content``, ``reasoning_content`` and ``tool_calls`` of new parts, as far as there are any."""
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in delta.parts:
            match part:
                case Text(text):
                    fields["content"] = fields.get("content", "") + text
                case Reasoning(text):
                    fields["reasoning_content"] = fields.get("reasoning_content", "") + text
                case CallStart(index, name):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": call_id(choice, part), "type": "function", "function": function}
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            fields["tool_calls"] = list(calls.values())
        return fields

    def _logprobs_of(self, choice: Choice, tokens: Sequence[OutputToken]) -> dict[str, object]:
        return {"content": map(self._token, tokens), "refusal": None}

    def _token(self, token: OutputToken) -> dict[str, object]:
        logprob = None if token.logprobs is None else token.logprobs.logprob
        top = () if token.logprobs is None else token.logprobs.top
        return {
            **self._named(token.id, logprob),
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in top],
        }

    def _named(self, token_id: int, logprob: float | None) -> dict[str, object]:
        spelled = self._answer.tokenizer.token_bytes(token_id)
        return {
            "token": self._answer.tokenizer.token_name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(spelled) if spelled else None,
        }


class CompletionWriter(ChoiceWriter):
    """OpenAI's legacy format: parallel lists, and a mapping from token to log-probability per position."""

    _kind = _chunk_kind = "text_completion"

    def _opening(self, choice: Choice) -> dict[str, object] | None:
        prompt_token_ids = _prompt_token_ids(choice)
        if choice.options.echo is None and not prompt_token_ids:
            return None
        text = choice.options.echo or ""
        logprobs = self._echoed(choice)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None, **prompt_token_ids}

    def _chunk(self, choice: Choice, delta: Delta) -> dict[str, object]:
        return {"index": choice.index, "text": delta.text, **self._ending(choice, delta)}

    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        echo = choice.options.echo or ""
        fields = {**self._chunk(choice, delta), "text": echo + delta.text, **_prompt_token_ids(choice)}
        echoed = self._echoed(choice)
        if echoed is not None:
            own = self._columns(() if choice.options.is_prompt_only else delta.tokens, len(echo))
            fields["logprobs"] = {name: [*column, *own[name]] for name, column in echoed.items()}
        return fields | self._prompt_logprobs(choice)

    def _echoed(self, choice: Choice) -> dict[str, list[object]] | None:
        """Log-probabilities of the repeated prompt; its first token has none."""
        num_top = choice.request.sampling.top_logprobs
        if choice.options.echo is None or num_top is None:
            return None
        ids = choice.request.prompt_token_ids
        found = [None, *(replace(one, top=one.top[:num_top]) for one in choice.prompt_logprobs)]
        bounds = self._answer.tokenizer.bounds(ids, choice.options.echo)
        tokens = [OutputToken(i, *bound, None, one) for i, bound, one in zip(ids, bounds, found, strict=True)]
        columns = self._columns(tokens, 0)
        columns["top_logprobs"][0] = None
        return columns

    def _logprobs_of(self, choice: Choice, tokens: Sequence[OutputToken]) -> dict[str, object]:
        return {**self._columns(tokens, len(choice.options.echo or ""))}

    def _columns(self, tokens: Sequence[OutputToken], start: int) -> dict[str, list[object]]:
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [None if t.logprobs is None else _finite(t.logprobs.logprob) for t in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [start + token.start for token in tokens],
        }

    def _top(self, token: OutputToken) -> dict[str, float | None]:
        """The most probable tokens, and the chosen token."""
        if token.logprobs is None:
            return {}
        entries = (*token.logprobs.top, (token.id, token.logprobs.logprob))
        return {self._name(token_id): _finite(logprob) for token_id, logprob in entries}

    def _name(self, token_id: int) -> str:
        """Distinct also for incomplete characters, which would all decode to U+FFFD."""
        spelled = self._answer.tokenizer.token_bytes(token_id)
        try:
            return spelled.decode("utf-8") or self._answer.tokenizer.token_name(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _prompt_token_ids(choice: Choice) -> dict[str, object]:
    return {"prompt_token_ids": choice.request.prompt_token_ids} if choice.options.token_ids else {}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None else max(logprob, _LOWEST_LOGPROB)
