"""Request bodies: the fields of OpenAI and vLLM, strictly typed, and a few of our own.

``null`` means "not given", as in OpenAI's API. Known fields that do not affect answers are ignored; unsupported ones are
refused unless their value disables them. ``deploy.api.body`` ignores unknown fields with a warning if so configured.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo
from pydantic_core import PydanticCustomError

from cluster.sampling_params import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from deploy.api.chat_template import TemplateOptions

MAX_STOP_CHARS = 1024
MAX_LEGACY_LOGPROBS = 5

# Tags of union members, which pydantic inserts into error paths.
FORM_TAGS = frozenset({"<text>", "<texts>", "<ids>", "<id lists>", "<parts>"})


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def _only(*allowed: object) -> BeforeValidator:
    """A known but unsupported field: absent, or one of the values that disable it."""

    def check(value: object) -> object:
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise PydanticCustomError("not_supported", "is not supported yet; leave it out")
        return value

    return BeforeValidator(check)


def _without_tools(value: object, info: ValidationInfo) -> object:
    """``tool_choice`` "none" disables tools."""
    if value is not None and value != [] and info.data.get("tool_choice") != "none":
        raise PydanticCustomError("not_supported", 'are not supported yet; leave them out, or send tool_choice "none"')
    return value


def _off_is_none(value: object) -> object:
    """vLLM's -1 and 0 disable top-k."""
    return None if type(value) is int and value in (-1, 0) else value


def _text_or(lists: str, message: str) -> Discriminator:
    def form(value: object) -> str | None:
        return "<text>" if isinstance(value, str) else lists if isinstance(value, list) else None

    return Discriminator(form, custom_error_type="form", custom_error_message=message)


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
    _text_or("<texts>", "must be a string or a list of strings"),
]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: chunks are never padded


class GenerationFields(_Strict):
    """Common fields of chat and completions. ``SamplingParams`` checks the ranges that are not bounded here."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: _Stop | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Sampling parameters beyond OpenAI's API, with vLLM's names.
    top_k: Annotated[int | None, BeforeValidator(_off_is_none)] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=256)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None

    # vLLM's fields that are not supported, each with the values that disable it.
    bad_words: Annotated[Any, _only([])] = None
    priority: Annotated[Any, _only(0)] = None
    prompt_logprobs: Annotated[Any, _only(False)] = None
    logits_processors: Annotated[Any, _only([])] = None
    structured_outputs: Annotated[Any, _only()] = None
    guided_json: Annotated[Any, _only()] = None
    guided_regex: Annotated[Any, _only()] = None
    guided_choice: Annotated[Any, _only()] = None
    guided_grammar: Annotated[Any, _only()] = None
    use_beam_search: Annotated[Any, _only(False)] = None
    length_penalty: Annotated[Any, _only(1.0, 1)] = None
    truncate_prompt_tokens: Annotated[Any, _only()] = None
    spaces_between_special_tokens: Annotated[Any, _only(True)] = None
    return_tokens_as_token_ids: Annotated[Any, _only(False)] = None

    # Our own. drafting: "auto", "off", a drafter, or a chain "a>b" in which b verifies a's drafts before the target does.
    drafting: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    drafting_details: bool | None = None  # answers report the text of each drafter

    # Accepted and ignored: they affect storage, billing or caching of an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    moderation: Annotated[Any, _only()] = None


class ContentPart(_Strict):
    type: Literal["text"]
    text: str


_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(min_length=1), Tag("<parts>")],
    _text_or("<parts>", "must be a string or a list of text parts"),
]


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    # Before the content, which is null beside these, so that the error names the unsupported field.
    function_call: Annotated[Any, _only()] = None
    tool_calls: Annotated[Any, _only([])] = None
    content: _Content
    name: str | None = None
    tool_call_id: str | None = None

    # Empty fields of earlier answers that a caller sends back.
    refusal: Annotated[Any, _only()] = None
    annotations: Annotated[Any, _only([])] = None
    audio: Annotated[Any, _only()] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: a role of theirs and a single string."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        rendered = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            rendered["name"] = self.name
        if self.tool_call_id is not None:
            rendered["tool_call_id"] = self.tool_call_id
        return rendered


_Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class _ChatFields(_Strict):
    """Messages and how they are rendered to a prompt."""

    messages: _Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Annotated[Any, _only()] = None
    documents: Annotated[Any, _only([])] = None
    mm_processor_kwargs: Annotated[Any, _only()] = None
    media_io_kwargs: Annotated[Any, _only()] = None

    def template_options(self) -> TemplateOptions:
        """Raises InvalidField: the fields contradict each other."""
        continues = bool(self.continue_final_message)
        adds = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return TemplateOptions(adds, continues, self.chat_template_kwargs or {})


class ChatRequest(GenerationFields, _ChatFields):
    """POST /v1/chat/completions"""

    max_completion_tokens: int | None = None
    echo: Annotated[Any, _only(False)] = None
    add_special_tokens: Annotated[Any, _only(False)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    parallel_tool_calls: bool | None = None  # ignored: it has no effect without tools
    response_format: Annotated[Any, _only({"type": "text"})] = None
    tool_choice: Annotated[Any, _only("none")] = None  # before the tools, which it disables
    tools: Annotated[Any, AfterValidator(_without_tools)] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none")] = None
    modalities: Annotated[Any, _only(["text"])] = None
    audio: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
    reasoning_effort: Annotated[Any, _only("none")] = None
    verbosity: Annotated[Any, _only("medium")] = None
    web_search_options: Annotated[Any, _only()] = None


_Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Tag("<texts>")]
    | Annotated[list[_TokenId], Tag("<ids>")]
    | Annotated[list[list[_TokenId]], Tag("<id lists>")],
    Discriminator(
        _form_of_prompt,
        custom_error_type="form",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
    ),
]


class CompletionRequest(GenerationFields):
    """POST /v1/completions"""

    prompt: _Prompt
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, _only()] = None

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
    messages: _Messages | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[Any, _only([])] = None


class DetokenizeRequest(_Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[_TokenId]
