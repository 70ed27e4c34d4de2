"""Tools of the Responses API: those that a model can call here, by the name that the model is given."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from deploy.api.answer_parts import whole_characters
from deploy.api.errors import bad_request
from deploy.api.fields import FreeObject, Strict, type_of
from deploy.api.messages import MAX_TOOLS, FunctionName, Parameters

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


def _kind(tool: object) -> str | None:
    kind = type_of(tool)
    if not isinstance(kind, str):
        return None
    return f"<{kind}>" if f"<{kind}>" in TOOL_TAGS else "<hosted>"


_OF_KIND = Discriminator(_kind, custom_error_type="form", custom_error_message="must be an object with a type")
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
