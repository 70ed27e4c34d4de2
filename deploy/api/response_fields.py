"""POST /v1/responses: OpenAI's Responses API, translated to a chat call."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from deploy.api.fields import FreeObject, Strict, TranslatedRequest, only, text_or
from deploy.api.messages import MAX_PARTS, MAX_TOOLS, CallId, FunctionName, Parameters

_NOT_STORED = "is not supported: responses are not stored; send the whole conversation as input"


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Annotated[Any, only([])] = None
    logprobs: Any = None


Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]

_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<parts>")],
    text_or("<parts>", "must be a string or a list of text parts"),
]


class _Item(Strict):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: CallId
    output: _Content


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: Annotated[Any, only()] = None


ITEM_TAGS = ("<message>", "<function_call>", "<function_call_output>", "<reasoning>")


def _kind(item: object) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind}>" if f"<{kind}>" in ITEM_TAGS else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _kind,
        custom_error_type="form",
        custom_error_message="must be an item of type message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class ResponsesRequest(TranslatedRequest):
    """POST /v1/responses"""

    id_prefix: ClassVar[str] = "resp_"
    own_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "tool_choice.function": "tool_choice",
        "messages": "input",
    }

    model: str
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1, max_length=4096), Tag("<parts>")],
        text_or("<parts>", "must be a string or a list of items"),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[FunctionChoice, Tag("<name>")],
        Discriminator(lambda value: "<name>" if isinstance(value, dict | FunctionChoice) else "<text>"),
    ] | None = None  # fmt: skip
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    # Beyond OpenAI's API, as in chat.
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    drafting: str | None = None
    slo: Any = None

    # Nothing is stored, whatever is asked for: answers say "store": false.
    store: bool | None = None
    previous_response_id: Annotated[Any, only(advice=_NOT_STORED)] = None
    conversation: Annotated[Any, only(advice=_NOT_STORED)] = None
    background: Annotated[Any, only(False)] = None
    include: Annotated[Any, only([], ["reasoning.encrypted_content"])] = None
    truncation: Annotated[Any, only("disabled")] = None
    reasoning: Annotated[Any, only({}, {"effort": None}, {"effort": None, "summary": None})] = None
    top_logprobs: Annotated[Any, only(0)] = None
    max_tool_calls: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None

    # Accepted and ignored.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def chat_fields(self) -> dict[str, Any]:
        names = ("model", "temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "stream")
        others = ("chat_template_kwargs", "cache_salt", "drafting", "slo", "parallel_tool_calls", "metadata")
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*names, *others)}
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["messages"] = self._messages()
        if self.tools:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = choice
        form = self.text.format if self.text is not None else None
        if form is not None and form.type != "text":
            fields["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
        return {name: value for name, value in fields.items() if value is not None}

    def _messages(self) -> list[dict[str, Any]]:
        """An assistant's reasoning, text and calls, which are items of their own here, are one message there."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        answer: dict[str, Any] | None = None
        for item in self.input:
            match item:
                case MessageItem() if item.role != "assistant":
                    messages.append({"role": item.role, "content": _text(item.content)})
                    answer = None
                    continue
                case CallOutputItem():
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                    answer = None
                    continue
            if answer is None or (isinstance(item, MessageItem) and answer["content"]):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            match item:
                case MessageItem():
                    answer["content"] = _text(item.content)
                case CallItem():
                    function = {"name": item.name, "arguments": item.arguments}
                    answer.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
                case ReasoningItem():
                    answer["reasoning_content"] = _text(item.content or item.summary or [])
        return messages


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
