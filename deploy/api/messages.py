"""Messages of a conversation, tools, and what is asked about tools, as OpenAI's chat API writes them."""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationInfo
from pydantic_core import PydanticCustomError, from_json

from deploy.api.body import FreeObject, Strict, only, text_or
from deploy.api.tool_formats.parameters import Parameters as ToolParameters

MAX_TOOLS = 128
MAX_PARTS = 4096  # of one text

CallId = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Annotated[str, Field(max_length=64)]
# OpenAI allows 64 characters, Anthropic 128; a function of a namespace has two such names.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]


class ContentPart(Strict):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    text_or("<parts>", "must be a string or a list of text parts"),
]


def text_of(content: str | list[ContentPart] | None) -> str:
    """Parts are joined by line breaks."""
    return content or "" if not isinstance(content, list) else "\n".join(part.text for part in content)


class CalledFunction(Strict):
    name: FunctionName
    arguments: str


class ToolCall(Strict):
    """A call that the model made in an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a streamed answer, which some callers send back

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, which templates expect; arguments that are none stay text."""
        try:
            arguments = from_json(self.function.arguments.strip() or "{}")
        except ValueError:
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def _needed(content: object, info: ValidationInfo) -> object:
    """Only an assistant's message with tool calls may have no content."""
    if content is None and not info.data.get("tool_calls"):
        raise PydanticCustomError("missing", "is required")
    return content


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    # Before the content, which may be null beside them.
    function_call: Annotated[Any, only(advice="was replaced by tool_calls")] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    content: Annotated[Content | None, AfterValidator(_needed), Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    # Fields of earlier answers that a caller sends back.
    refusal: Annotated[Any, only()] = None
    annotations: list[Any] | None = None  # ignored: what a search of another server found
    audio: Annotated[Any, only()] = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: a role of theirs and a single string."""
        rendered: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content),
        }
        others = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
        }
        return rendered | {name: value for name, value in others.items() if value is not None}


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("form", "must be the schema of an object")
    return schema


Parameters = Annotated[FreeObject, AfterValidator(_of_object)]


class FunctionDefinition(Strict):
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None  # a JSON schema; None: no arguments
    strict: bool | None = None  # calls match the schema also where the model chooses to call

    @property
    def arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}

    @cached_property
    def parameters_read(self) -> ToolParameters:
        return ToolParameters(self.arguments)


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        function = self.function
        described = {"name": function.name, "description": function.description or "", "parameters": function.arguments}
        return {"type": "function", "function": described}


class ToolName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: ToolName


def _form_of_choice(value: object) -> object:
    if value is not None and value not in ("none", "auto", "required") and not isinstance(value, dict):
        raise PydanticCustomError("form", 'must be "none", "auto", "required", or an object that names a function')
    return value


def _distinct(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise PydanticCustomError("form", "must have different names; {name} comes twice", {"name": twice})
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_distinct)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[NamedTool, Tag("<name>")],
    Discriminator(lambda value: "<name>" if isinstance(value, dict | NamedTool) else "<text>"),
    BeforeValidator(_form_of_choice),
]
