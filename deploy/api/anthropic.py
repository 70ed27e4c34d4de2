"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens, translated to a chat call, and the answers of the first:
a message, and its events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json

from cluster.types import FinishReason
from deploy.api.answer import Answer, Event, PartsWriter, acceptance_of, call_id, named_event, usage_of
from deploy.api.answer_parts import Arguments, CallStart, Part, Reasoning, Text
from deploy.api.body import FreeObject, Hint, Strict, text_or, type_of
from deploy.api.errors import ApiError, bad_request
from deploy.api.messages import MAX_PARTS, MAX_TOOLS, CallId, Effort, FunctionName, Parameters
from deploy.api.schema import CommonFields, TranslatedRequest

# Claude Code's note on billing, another one in each call, which would keep prompts out of the prefix cache.
_BILLING = "x-anthropic-billing-header:"
# Variables by which chat templates turn reasoning on: of Qwen3 and GLM, and of DeepSeek and Granite.
_THINKING_VARIABLES = ("enable_thinking", "thinking")


class _Cacheable(Strict):
    cache_control: Any = None  # ignored: whatever prompts share is cached


class TextBlock(_Cacheable):
    type: Literal["text"]
    text: str
    citations: Any = None


class ToolUseBlock(_Cacheable):
    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: FreeObject
    caller: Any = None


def _supported(*kinds: str) -> BeforeValidator:
    """Names the type of a block that is refused, whatever else it holds."""

    def check(block: object) -> object:
        if (kind := type_of(block)) not in kinds:
            told = {"kind": str(kind)[:40], "known": ", ".join(kinds)}
            raise PydanticCustomError("form", "blocks of type {kind} are not supported here, only {known}", told)
        return block

    return BeforeValidator(check)


_TextParts = Annotated[list[Annotated[TextBlock, _supported("text")]], Field(max_length=MAX_PARTS, fail_fast=True)]
_Text = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[_TextParts, Tag("<parts>")],
    text_or("<parts>", "must be a string or a list of text blocks"),
]


class ToolResultBlock(_Cacheable):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: _Text | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        return f"Error: {text}" if self.is_error else text


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: Any = None  # ignored


class RedactedThinkingBlock(Strict):
    """Ignored: only Anthropic can read it."""

    type: Literal["redacted_thinking"]
    data: Any = None


_Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(lambda block: f"<{type_of(block)}>"),
    _supported("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]
_ROLES = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[_Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
        text_or("<parts>", "must be a string or a list of blocks"),
    ]

    @property
    def blocks(self) -> Sequence[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> "AnthropicMessage":
        misplaced = next((block.type for block in self.blocks if block.type not in _ROLES[self.role]), None)
        if misplaced is not None:
            told = {"role": self.role, "kind": misplaced}
            raise PydanticCustomError("form", "has the role {role}, which has no blocks of type {kind}", told)
        return self


class CustomTool(_Cacheable):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None

    # Ignored.
    allowed_callers: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None


class BuiltInTool(Strict):
    """A tool that Anthropic's servers run or its models know, such as ``web_search_20250305``: left out, with a warning."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]


_Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[BuiltInTool, Tag("<built-in>")],
    Discriminator(lambda tool: "<custom>" if type_of(tool) in (None, "custom") else "<built-in>"),
]


class AnthropicToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int | None, Hint()] = None
    display: Any = None  # ignored: all of it is shown


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: FreeObject = Field(alias="schema")


class OutputConfig(Strict):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(TranslatedRequest):
    """POST /v1/messages/count_tokens"""

    id_prefix: ClassVar[str] = "msg_"
    own_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "tool_choice.function": "tool_choice",
        "stop": "stop_sequences",
        "messages": "messages",  # several of these may be one of a chat
    }

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    system: _Text | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None  # beyond Anthropic's API, as in chat

    def without_effect(self) -> Iterator[str]:
        """Built-in tools, and hints."""
        yield from (f"tools.{i} ({tool.type})" for i, tool in enumerate(self.tools or ()) if isinstance(tool, BuiltInTool))
        yield from super().without_effect()

    def chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"messages": self._chat_messages(), **self._tool_fields()}
        variables = {} if self.thinking is None else dict.fromkeys(_THINKING_VARIABLES, self.thinking.type != "disabled")
        if variables or self.chat_template_kwargs:
            fields["chat_template_kwargs"] = variables | (self.chat_template_kwargs or {})
        if self.output_config is not None and (form := self.output_config.format) is not None:
            fields["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema_}}
        if self.output_config is not None and self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
        match fields["messages"]:
            case [*_, {"tool_calls": _}]:
                raise bad_request("messages", "must not end with a tool_use block: its tool_result is missing")
            case [*_, {"role": "assistant"}]:
                fields["continue_final_message"] = True
        return fields

    def _chat_messages(self) -> list[dict[str, Any]]:
        """Consecutive messages of one role are one there, and a tool's result is a message of its own."""
        messages: list[dict[str, Any]] = []

        def of_role(role: str) -> dict[str, Any]:
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            return messages[-1]

        for text in [self.system] if isinstance(self.system, str) else [block.text for block in self.system or ()]:
            if text and not text.startswith(_BILLING):
                of_role("system")["content"].append({"type": "text", "text": text})
        for message in self.messages:
            for block in message.blocks:
                match block:
                    case TextBlock():
                        of_role(message.role)["content"].append({"type": "text", "text": block.text})
                    case ToolResultBlock():
                        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
                    case ToolUseBlock():
                        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                        of_role("assistant").setdefault("tool_calls", []).append({"id": block.id, "function": function})
                    case ThinkingBlock():
                        of_role("assistant").setdefault("reasoning_content", []).append(block.thinking)
        for written in messages:
            written["content"] = written["content"] or ""
            if "reasoning_content" in written:
                written["reasoning_content"] = "".join(written["reasoning_content"])
        return messages

    def _tool_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        tools = [tool for tool in self.tools or () if isinstance(tool, CustomTool)]
        if tools:
            given = [tool.model_dump(include={"name", "description", "strict"}, exclude_none=True) for tool in tools]
            functions = [{**one, "parameters": tool.input_schema} for one, tool in zip(given, tools, strict=True)]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name} if choice.name is not None else {}}
            fields["tool_choice"] = {"tool": named, "any": "required"}.get(choice.type, choice.type)
            if choice.disable_parallel_tool_use is not None:
                fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return fields


class MessagesRequest(CommonFields, CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: int  # at most what the context leaves is generated
    stop_sequences: list[str] | None = None
    metadata: dict[str, str | None] | None = None
    service_tier: str | None = None  # ignored

    def chat_fields(self) -> dict[str, Any]:
        metadata = {name: value for name, value in (self.metadata or {}).items() if value is not None}
        own = {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences, "metadata": metadata}
        return super().chat_fields() | own


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
