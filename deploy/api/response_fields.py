"""POST /v1/responses: OpenAI's Responses API, translated to a chat call."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from deploy.api.fields import FreeObject, Hint, Strict, only, text_or, type_of
from deploy.api.messages import MAX_TOOLS, Effort
from deploy.api.response_items import Item, messages_of, unread
from deploy.api.response_tools import (
    AllowedChoice,
    CallableTool,
    NamedChoice,
    ResponseTool,
    allowed,
    callables,
    chosen,
    hosted,
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
