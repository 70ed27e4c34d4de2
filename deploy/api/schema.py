"""Request bodies: the fields of OpenAI and vLLM, strictly typed, and a few of our own.

``null`` means "not given", as in OpenAI's API. Known fields that do not affect answers are ignored, some with a warning
(`Hint`); unsupported ones are refused unless their value disables them. ``deploy.api.body`` ignores unknown fields with a
warning if so configured.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    create_model,
)
from pydantic_core import PydanticCustomError

from cluster.config import SloClass
from cluster.errors import InvalidField
from cluster.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    SCALARS,
)
from deploy.api.body import Hint, Strict, field_error, only, text_or
from deploy.api.chat_template import TemplateOptions
from deploy.api.errors import ApiError, as_api_error, bad_request
from deploy.api.messages import Content, Effort, Messages, ToolChoice, Tools

MAX_STOP_CHARS = 1024
MAX_LEGACY_LOGPROBS = 5
MAX_PROMPTS = 1024


def _not_0(value: object) -> object:
    if value == 0 and type(value) is int:
        raise PydanticCustomError("form", "must be -1 or at least 1: a prompt has at least one token")
    return value


def _form_of_prompt(value: object) -> str | None:
    match value:
        case str():
            return "<text>"
        case [first, *_]:
            return {str: "<texts>", int: "<ids>", list: "<id lists>"}.get(type(first))
    return None


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Stop = Annotated[
    Annotated[_StopString, Tag("<text>")] | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<texts>")],
    text_or("<texts>", "must be a string or a list of strings"),
]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(fail_fast=True)]  # the context of the model bounds its length


def _no_allowed(words: list[str], info: ValidationInfo) -> list[str]:
    if words and info.data.get("allowed_token_ids") is not None:
        raise PydanticCustomError("form", "are not possible together with allowed_token_ids")
    return words


_BadWords = Annotated[
    list[Annotated[str, Field(max_length=100)]], Field(max_length=MAX_BAD_WORDS // 2), AfterValidator(_no_allowed)
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, each chunk has the usage so far
    include_obfuscation: bool | None = None  # ignored: chunks are never padded


def _object_or_text(value: object) -> object:
    if value is not None and not isinstance(value, dict | str):
        raise PydanticCustomError("form", "must be a JSON schema: an object, or a string that holds one")
    return value


_JsonSchema = Annotated[Any, BeforeValidator(_object_or_text)]
_Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class JsonSchemaFormat(Strict):
    name: str | None = None  # ignored, as are the next and the last: the schema is always enforced
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's field, and vLLM's type ``structural_tag``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None  # of a structural tag


class StructuredOutputs(Strict):
    """vLLM's field. Whitespace is always as json.dumps writes it."""

    json_: _JsonSchema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Annotated[Any, only()] = None


class Objectives(SloClass, Strict):
    """Service-level objectives of one call. None: no objective."""


SloField = Annotated[
    Annotated[str, Field(min_length=1, max_length=64), Tag("<text>")] | Annotated[Objectives, Tag("<objectives>")],
    Discriminator(
        lambda value: {str: "<text>", dict: "<objectives>", Objectives: "<objectives>"}.get(type(value)),
        custom_error_type="form",
        custom_error_message="must be the name of a class, or an object with ttft_ms and tpot_ms",
    ),
]


# Each under its own name; ``SamplingParams`` checks the ranges.
if TYPE_CHECKING:
    _Scalars = Strict
else:
    _Scalars = create_model(
        "_Scalars", __base__=Strict, **{name: (kind | None, None) for name, (kind, _) in SCALARS.items()}
    )


class CommonFields(_Scalars):
    """Of every API that generates text, beyond what the API itself has."""

    model: str | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # vLLM's
    # Our own. drafting: "auto", "off", a drafter, or a chain "a>b" in which b verifies a's drafts before the target does.
    drafting: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    slo: SloField | None = None  # a class of the configuration, or objectives


class OpenAiFields(CommonFields):
    """Of OpenAI's APIs. They are accepted and ignored: they affect storage, billing or caching of an answer."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class GenerationFields(OpenAiFields):
    """Common fields of chat and completions. ``id_prefix``: of answers."""

    id_prefix: ClassVar[str]

    max_tokens: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: _Stop | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None

    # vLLM's.
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: _BadWords | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, BeforeValidator(_not_0), Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None,
        BeforeValidator(lambda value: value if value is not False else None),
    ] = None

    # Structured output (`deploy.api.structured`): at most one of these.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None

    # vLLM's fields that are not supported, each with the values that disable it.
    logits_processors: Annotated[Any, only([])] = None
    use_beam_search: Annotated[Any, only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, only(False)] = None

    priority: Annotated[int | None, Hint(0)] = None
    length_penalty: Annotated[float | None, Hint(1.0)] = None  # of beam search
    spaces_between_special_tokens: Annotated[bool | None, Hint(True)] = None

    drafting_details: bool | None = None  # answers report the text of each drafter

    moderation: Annotated[Any, only()] = None


class _ChatFields(Strict):
    """Messages and how they are rendered to a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None

    chat_template: Annotated[Any, only()] = None
    documents: Annotated[Any, only([])] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Hint({})] = None  # there is no medium but text
    media_io_kwargs: Annotated[dict[str, Any] | None, Hint({})] = None
    reasoning_effort: Effort | None = None

    def template_options(self) -> TemplateOptions:
        """Raises InvalidField: the fields contradict each other."""
        continues = bool(self.continue_final_message)
        adds = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        tools = () if self.tool_choice == "none" else [tool.for_template() for tool in self.tools or ()]
        return TemplateOptions(adds, continues, self._effort() | (self.chat_template_kwargs or {}), tools)

    def _effort(self) -> dict[str, Any]:
        """The variables by which templates are told of the effort, as vLLM names them."""
        effort = self.reasoning_effort
        return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class PredictedContent(Strict):
    """The answer that the caller expects, which is drafted; a longer one than the context is cut."""

    type: Literal["content"]
    content: Content


class ChatRequest(GenerationFields, _ChatFields):
    """POST /v1/chat/completions"""

    id_prefix: ClassVar[str] = "chatcmpl-"
    own_names: ClassVar[Mapping[str, str]] = {}

    max_completion_tokens: int | None = None
    echo: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([], advice="was replaced by tools")] = None
    function_call: Annotated[Any, only("none", advice="was replaced by tool_choice")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: PredictedContent | None = None
    verbosity: Annotated[str | None, Hint("medium")] = None
    web_search_options: Annotated[dict[str, Any] | None, Hint()] = None


class TranslatedRequest(Strict):
    """The body of another API's call, which is translated to a chat call.

    ``own_names``: of fields of the chat call, and of what is below them; a longer path stands before a shorter one.
    """

    id_prefix: ClassVar[str]  # of answers
    own_names: ClassVar[Mapping[str, str]]

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """What only this API writes in its own way. Raises ApiError: it cannot be a chat call."""

    def as_chat(self) -> ChatRequest:
        """Raises ApiError (400), naming the field of the chat: of what only the chat checks, such as tools of one name."""
        fields = self.model_dump(include=_UNCHANGED, exclude_none=True) | self.chat_fields()
        try:
            return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise field_error(error.errors(include_url=False)[0], ChatRequest) from error

    @contextmanager
    def named_as_here(self) -> Iterator[None]:
        """Errors of the chat call name the fields of this one."""
        try:
            yield
        except (ApiError, InvalidField) as error:
            known = as_api_error(error, retry_after_s=0.0)
            assert known is not None, "both are expected failures"
            raise _renamed(known, self.own_names) from error


_UNCHANGED = {*CommonFields.model_fields, "chat_template_kwargs", "metadata", "parallel_tool_calls"}


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Several items of the body may be one message of the chat, so what is below ``messages`` is left out."""
    param = error.param or ""
    for name, own in names.items():
        if param == name or param.startswith(f"{name}."):
            own = own if name == "messages" else own + param.removeprefix(name)
            return bad_request(own, str(error).removeprefix(f"{param}: "), error.code)
    return error


_Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[_TokenIds, Tag("<ids>")]
    | Annotated[list[_TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<id lists>")],
    Discriminator(
        _form_of_prompt,
        custom_error_type="form",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
    ),
]


class CompletionRequest(GenerationFields):
    """POST /v1/completions"""

    id_prefix: ClassVar[str] = "cmpl-"

    prompt: _Prompt
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, only()] = None

    def prompts(self) -> Mapping[str, str | list[int]]:
        """Each prompt, by the path of its field."""
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        if isinstance(self.prompt[0], int):
            return {"prompt": self.prompt}
        return {f"prompt.{i}": cast("str | list[int]", one) for i, one in enumerate(self.prompt)}


class TokenizeRequest(_ChatFields):
    """POST /tokenize, of a prompt or of messages."""

    model: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: _TokenIds
