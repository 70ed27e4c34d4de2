"""OpenAI's Responses API: POST /v1/responses, translated to a chat call, and answers: a response object or its events."""

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from cluster.types import FinishReason
from deploy.api.answer import Answer, Event, PartsWriter, acceptance_of, call_id, named_event, usage_of
from deploy.api.answer_parts import Arguments, CallStart, Part, Text
from deploy.api.answer_parts import Reasoning as ReasoningPart
from deploy.api.body import FreeObject, Hint, Strict, only, text_or, type_of
from deploy.api.errors import ApiError
from deploy.api.messages import MAX_TOOLS, Effort
from deploy.api.response_items import (
    AllowedChoice,
    CallableTool,
    HostedTool,
    Item,
    NamedChoice,
    ResponseTool,
    allowed,
    callables,
    chosen,
    custom_input,
    hosted,
    messages_of,
    unread,
)
from deploy.api.schema import OpenAiFields, TranslatedRequest

_NOT_STORED = only(advice="is not supported: responses are not stored; send the whole conversation as input")


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[str | None, Hint("medium")] = None


class Reasoning(Strict):
    effort: Effort | None = None
    summary: Annotated[str | None, Hint()] = None  # reasoning is not summarized: answers have all of it
    generate_summary: Annotated[str | None, Hint()] = None


def _form_of_choice(value: object) -> str:
    kind = type_of(value)
    return "<text>" if kind is None else "<allowed>" if kind == "allowed_tools" else "<chosen>"


class ResponsesRequest(OpenAiFields, TranslatedRequest):
    """POST /v1/responses"""

    id_prefix: ClassVar[str] = "resp_"
    own_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function": "tool_choice",
        "messages": "input",
    }

    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1, max_length=4096), Tag("<parts>")],
        text_or("<parts>", "must be a string or a list of items"),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("<text>")]
        | Annotated[NamedChoice, Tag("<chosen>")]
        | Annotated[AllowedChoice, Tag("<allowed>")],
        Discriminator(_form_of_choice),
    ] | None = None  # fmt: skip
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # beyond OpenAI's API, as in chat

    # Nothing is stored, whatever ``store`` asks for: answers say "store": false.
    previous_response_id: Annotated[Any, _NOT_STORED] = None
    conversation: Annotated[Any, _NOT_STORED] = None
    background: Annotated[Any, only(False)] = None
    prompt: Annotated[Any, only()] = None

    include: Annotated[list[str] | None, Hint([], ["reasoning.encrypted_content"])] = None  # reasoning is sent as it is
    top_logprobs: Annotated[int | None, Hint(0)] = None
    max_tool_calls: Annotated[int | None, Hint()] = None  # of tools that OpenAI's servers run

    client_metadata: dict[str, Any] | None = None  # Codex's, ignored

    def without_effect(self) -> Iterator[str]:
        yield from super().without_effect()
        yield from hosted(self.tools or ())
        yield from () if isinstance(self.input, str) else unread(self.input)

    def callables(self) -> Mapping[str, CallableTool]:
        """The tools that can be called here, by the names that the model is given."""
        return dict(callables(self.tools or ()))

    def chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_completion_tokens": self.max_output_tokens, **self._tool_fields()}
        fields["messages"] = messages_of(self.instructions, self.input)
        fields["reasoning_effort"] = None if self.reasoning is None else self.reasoning.effort
        form = self.text.format if self.text is not None else None
        if form is not None and form.type != "text":
            fields["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
        return fields

    def _tool_fields(self) -> dict[str, Any]:
        named = list(callables(self.tools or ()))
        known, choice = dict(named), self.tool_choice
        if isinstance(choice, NamedChoice):
            asked: Any = {"type": "function", "function": {"name": chosen(choice, known)}}
        elif isinstance(choice, AllowedChoice):
            named, asked = list(allowed(choice, known).items()), choice.mode
        else:
            asked = choice
        tools = [{"type": "function", "function": tool.function} for _, tool in named]
        return {"tools": tools or None, "tool_choice": asked}


class ResponseWriter(PartsWriter):
    """Parts become items of the output."""

    def __init__(self, fields: ResponsesRequest, answer: Answer) -> None:
        super().__init__(answer)
        self._id = answer.id
        sampling = self._choice.request.sampling
        self._fields = fields
        self._tools = fields.callables()
        self._items: list[dict[str, Any]] = []
        self._input = ""  # the arguments of a custom tool, of which ``input`` is told when they are complete
        self._num_events = 0
        self._head = {
            "id": answer.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.model,
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if fields.reasoning is None else fields.reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": _text_format(fields)},
            "tool_choice": fields.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in fields.tools or () if not isinstance(tool, HostedTool)],
            "top_p": sampling.top_p,
            "truncation": fields.truncation or "disabled",
            "user": fields.user,
        }

    def _whole(self) -> Event:
        return self._response(self._status())

    def _opening(self) -> Iterator[Event]:
        response = self._response("in_progress")
        yield from ({"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress"))

    def closing(self) -> bytes:
        status = self._status()
        return self._event({"type": f"response.{status}", "response": self._response(status)})

    def error(self, error: ApiError) -> bytes:
        """Sends both ``error`` and ``response.failed``: OpenAI sends either, and each client waits for one of them."""
        told = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        if self._items and self._items[-1]["status"] == "in_progress":
            self._items[-1]["status"] = "incomplete"
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": str(error)}}
        return self._event(told) + self._event({"type": "response.failed", "response": failed})

    def _event(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        return named_event(numbered)

    def _status(self) -> str:
        return "incomplete" if self._choice.finish is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, object]:
        is_over = status != "in_progress"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items if is_over else [],
            "usage": self._usage() if is_over else None,
            **({"outrider": acceptance_of([self._choice])} if is_over else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = usage_of([self._choice])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }

    # ---- items

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Text(text):
                yield from self._begin("message")
                item = self._items[-1]
                item["content"][0]["text"] += text
                yield self._at("response.output_text.delta", content_index=0, delta=text, logprobs=[])
            case ReasoningPart(text):
                yield from self._begin("reasoning")
                self._items[-1]["content"][0]["text"] += text
                yield self._at("response.reasoning_text.delta", content_index=0, delta=text)
            case CallStart():
                yield from self._end_item()
                self._input = ""
                self._items.append(self._call_item(part))
                yield self._at("response.output_item.added", item=dict(self._items[-1]))
            case Arguments(_, text):
                if self._items[-1]["type"] == "custom_tool_call":
                    self._input += text
                else:
                    self._items[-1]["arguments"] += text
                    yield self._at("response.function_call_arguments.delta", delta=text)

    def _call_item(self, call: CallStart) -> dict[str, Any]:
        tool = self._tools.get(call.name)
        is_custom = tool is not None and tool.is_custom
        item: dict[str, Any] = {
            "type": "custom_tool_call" if is_custom else "function_call",
            "id": f"{'ctc' if is_custom else 'fc'}_{self._id[5:]}_{len(self._items)}",
            "call_id": call_id(self._choice, call),
            "name": call.name if tool is None else tool.name,
            "input" if is_custom else "arguments": "",
            "status": "in_progress",
        }
        return item if tool is None or tool.namespace is None else {**item, "namespace": tool.namespace}

    def _begin(self, kind: str) -> Iterator[Event]:
        """Begins an item of text, unless the last one goes on."""
        if self._items and self._items[-1]["type"] == kind and self._items[-1].get("status") == "in_progress":
            return
        yield from self._end_item()
        item: dict[str, Any]
        item_id = f"{'msg' if kind == 'message' else 'rs'}_{self._id[5:]}_{len(self._items)}"
        if kind == "message":
            item = {"type": kind, "id": item_id, "role": "assistant", "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": kind, "id": item_id, "summary": [], "content": [], "status": "in_progress"}
            part = {"type": "reasoning_text", "text": ""}
        self._items.append(item)
        yield self._at("response.output_item.added", item={**item, "content": []})
        item["content"].append(part)
        yield self._at("response.content_part.added", content_index=0, part=dict(part))

    def _end(self, finish: FinishReason) -> Iterator[Event]:
        is_cut = finish is FinishReason.LENGTH or self._choice.ends_in_call
        return self._end_item("incomplete" if is_cut else "completed")

    def _end_item(self, status: str = "completed") -> Iterator[Event]:
        """``status``: of the item, which is complete where another follows."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        match item["type"]:
            case "function_call":
                arguments = item["arguments"]
                yield self._at("response.function_call_arguments.done", name=item["name"], arguments=arguments)
            case "custom_tool_call":
                item["input"] = text = custom_input(self._input)
                yield self._at("response.custom_tool_call_input.delta", delta=text)
                yield self._at("response.custom_tool_call_input.done", input=text)
            case kind:
                part = item["content"][0]
                more: Event = {"logprobs": []} if kind == "message" else {}
                name = "output_text" if kind == "message" else "reasoning_text"
                yield self._at(f"response.{name}.done", content_index=0, text=part["text"], **more)
                yield self._at("response.content_part.done", content_index=0, part=dict(part))
        yield self._at("response.output_item.done", item=dict(item))

    def _at(self, kind: str, **fields: Any) -> Event:
        """An event of the last item."""
        place = {"output_index": len(self._items) - 1}
        if not kind.startswith("response.output_item"):
            place["item_id"] = self._items[-1]["id"]
        return {"type": kind, **place, **fields}


def _text_format(fields: ResponsesRequest) -> dict[str, Any]:
    form = fields.text.format if fields.text is not None else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
