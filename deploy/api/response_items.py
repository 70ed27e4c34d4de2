"""Items of a conversation in the Responses API, and the messages that they make; and its tools: those that a model can call
here, by the name that the model is given."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from deploy.api.answer_parts import whole_characters
from deploy.api.body import FreeObject, Hint, Strict, text_or, type_of
from deploy.api.errors import bad_request
from deploy.api.messages import MAX_PARTS, MAX_TOOLS, CallId, FunctionName, Parameters

_SEPARATOR = "__"  # between a namespace and a function, as in vLLM
_TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class CustomTool(Strict):
    """Takes a text. The model calls it as a function with one string, ``input``."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: FreeObject | None = None  # a grammar, of which the model is told; it is not enforced


class HostedTool(BaseModel):
    """A tool that OpenAI's servers run, such as ``web_search``. It is left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str


def _kind_of_tool(tool: object) -> str | None:
    kind = type_of(tool)
    if not isinstance(kind, str):
        return None
    return f"<{kind}>" if f"<{kind}>" in TOOL_TAGS else "<hosted>"


_OF_KIND = Discriminator(_kind_of_tool, custom_error_type="form", custom_error_message="must be an object with a type")
_Inner = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<namespace>")]  # namespaces do not nest
    | Annotated[HostedTool, Tag("<hosted>")],
    _OF_KIND,
]


class NamespaceTool(Strict):
    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[_Inner], Field(max_length=MAX_TOOLS)]


TOOL_TAGS = ("<function>", "<custom>", "<namespace>", "<hosted>")
ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    _OF_KIND,
]


class NamedChoice(Strict):
    type: Literal["function", "custom"]
    name: str


class AllowedName(Strict):
    type: str
    name: str | None = None


class AllowedChoice(Strict):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedName], Field(min_length=1, max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as its caller knows it. ``function``: how the model is told of it."""

    name: str
    namespace: str | None
    is_custom: bool
    function: Mapping[str, Any]


def flat_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def callables(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, CallableTool]]:
    """The tools that can be called here, by the names that the model is given."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                if not isinstance(inner, HostedTool):
                    yield _callable(inner, tool.name)
        elif not isinstance(tool, HostedTool):
            yield _callable(tool, None)


def _callable(tool: FunctionTool | CustomTool, namespace: str | None) -> tuple[str, CallableTool]:
    name = flat_name(tool.name, namespace)
    function: dict[str, Any] = {"name": name}
    if isinstance(tool, FunctionTool):
        function |= tool.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
        return name, CallableTool(tool.name, namespace, False, function)
    form = tool.format or {}
    told = [
        tool.description or "",
        f"The input is a text of this grammar:\n{form['definition']}" if "definition" in form else "",
    ]
    function |= {"description": "\n".join(filter(None, told)), "parameters": _TEXT_INPUT}
    return name, CallableTool(tool.name, namespace, True, function)


def custom_input(arguments: str) -> str:
    """The text that a custom tool is called with; arguments of another form than it was told are taken as they are."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return whole_characters(text) if isinstance(text, str) else arguments


def hosted(tools: Sequence[ResponseTool]) -> Iterator[str]:
    """The paths of tools that are left out, each with its type."""
    for i, tool in enumerate(tools):
        if isinstance(tool, HostedTool):
            yield f"tools.{i} ({tool.type[:64]})"
        elif isinstance(tool, NamespaceTool):
            yield from (f"tools.{i}.{path}" for path in hosted(tool.tools))


def chosen(choice: NamedChoice, known: Mapping[str, CallableTool]) -> str:
    """The name that the model is given of a tool chosen by its flat name, or by its own in a namespace.

    Raises ApiError: 400, no tool or several have the name.
    """
    if choice.name in known:
        return choice.name
    found = [flat for flat, tool in known.items() if tool.name == choice.name]
    if len(found) != 1:
        several = f"is in several namespaces: {', '.join(found)}" if found else "is none of the tools"
        raise bad_request("tool_choice.name", f"{choice.name[:64]!r} {several}")
    return found[0]


def allowed(choice: AllowedChoice, known: Mapping[str, CallableTool]) -> dict[str, CallableTool]:
    """Raises ApiError: 400, it names none of the tools."""
    names = {one.name for one in choice.tools}
    found = {flat: tool for flat, tool in known.items() if flat in names or tool.name in names}
    if not found:
        raise bad_request("tool_choice.tools", "name none of the tools")
    return found


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None  # ignored: what a search of another server found
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
    namespace: FunctionName | None = None
    arguments: str


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: FunctionName
    namespace: FunctionName | None = None
    input: str


class ShellCallItem(_Item):
    type: Literal["local_shell_call"]
    call_id: CallId
    action: dict[str, Any]


class CallOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    name: str | None = None
    output: _Content


class ShellOutputItem(_Item):
    type: Literal["local_shell_call_output"]
    id: CallId  # of the call
    output: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: Annotated[str | None, Hint()] = None  # by another server, which alone can read it


class HostedItem(BaseModel):
    """A call of a tool that another server ran. It is left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str


_CALLS = "<function_call>", "<custom_tool_call>", "<local_shell_call>"
_OUTPUTS = "<function_call_output>", "<custom_tool_call_output>", "<local_shell_call_output>"
_HOSTED = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"}
)
ITEM_TAGS = ("<message>", "<reasoning>", *_CALLS, *_OUTPUTS, "<hosted item>")


def _kind_of_item(item: object) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    if isinstance(kind, str) and kind in _HOSTED:
        return "<hosted item>"
    return f"<{kind}>" if f"<{kind}>" in ITEM_TAGS else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[ShellCallItem, Tag("<local_shell_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[CallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ShellOutputItem, Tag("<local_shell_call_output>")]
    | Annotated[HostedItem, Tag("<hosted item>")],
    Discriminator(
        _kind_of_item,
        custom_error_type="form",
        custom_error_message="must be a message, a call of a tool, the output of a call, or reasoning",
    ),
]


def unread(items: Sequence[Item]) -> Iterator[str]:
    """The paths of items, and of fields of items, that are left out."""
    for i, item in enumerate(items):
        if isinstance(item, HostedItem):
            yield f"input.{i} ({item.type})"
        elif isinstance(item, ReasoningItem):
            yield from (f"input.{i}.{path}" for path in item.without_effect())


def messages_of(instructions: str | None, asked: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat call. An assistant's reasoning, text and calls, which are items of their own here, are one
    message there, and so are the instructions and the system messages after them: many templates take no second one."""
    opening = [] if instructions is None else [instructions]
    messages: list[dict[str, Any]] = []
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
        asked = ()
    answer: dict[str, Any] | None = None
    for item in asked:
        told = _told(item)
        if told is not None:
            answer = None
            if told["role"] == "system" and not messages:
                opening.append(told["content"])
            else:
                messages.append(told)
        elif (part := _part_of_answer(item)) is not None:
            if answer is None or ("content" in part and answer["content"]):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            if calls := part.pop("tool_calls", ()):
                answer.setdefault("tool_calls", []).extend(calls)
            answer |= part
    return [{"role": "system", "content": "\n\n".join(opening)}, *messages] if opening else messages


def _told(item: Item) -> dict[str, Any] | None:
    """A message of another role than the assistant's."""
    match item:
        case MessageItem() if item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": _text(item.content)}
        case CallOutputItem():
            return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        case ShellOutputItem():
            return {"role": "tool", "tool_call_id": item.id, "content": item.output}
    return None


def _part_of_answer(item: Item) -> dict[str, Any] | None:
    """What an item adds to an assistant's message; None: nothing."""
    match item:
        case MessageItem():
            return {"content": _text(item.content)}
        case ReasoningItem():
            text = _text(item.content or item.summary or [])
            return {"reasoning_content": text} if text else None
        case CallItem():
            return _call(item.call_id, flat_name(item.name, item.namespace), item.arguments)
        case CustomCallItem():
            return _call(item.call_id, flat_name(item.name, item.namespace), json.dumps({"input": item.input}))
        case ShellCallItem():
            return _call(item.call_id, "local_shell", json.dumps(item.action))
    return None


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"id": call_id, "function": {"name": name, "arguments": arguments}}]}


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
