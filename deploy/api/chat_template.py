"""Renders chat messages to a prompt with the model's Jinja template, sandboxed because templates are untrusted.

Control tokens cannot be injected: only the chat template makes them; a message that spells one stays text. The template is
rendered a second time with masked messages: every character that a control token can begin or end with is replaced by one
that does not occur in the messages. Control tokens found in that rendering are the template's own, and positions in both
renderings agree.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import InvalidField, ModelUnavailable

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now", *_SPECIAL)

# Of tools, for models whose template does not know them: in the form that Hermes and SmolLM2 were trained on.
_INSTRUCTIONS = """You may call functions to assist with the user query. The functions are described in JSON:

<tools>
{tools}
</tools>

For each function call, answer with a JSON object with the function's name and arguments within <tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""

# Marks the end of the final message: a Unicode noncharacter, which occurs in no text.
_END = "\ufdd0"


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a template is rendered. Raises InvalidField for both endings, or a variable with a reserved name."""

    add_generation_prompt: bool = True  # end with the start of the assistant's answer
    continue_final_message: bool = False  # end with the final message's content, which the model continues
    variables: Mapping[str, Any] = field(default_factory=dict)  # additional ones (``chat_template_kwargs``)
    tools: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidField("continue_final_message", True, "must not be true together with add_generation_prompt")
        for name in self.variables:
            if name in _RESERVED or not name.isidentifier():
                raise InvalidField(f"chat_template_kwargs.{name[:40]}", name, "is not a valid name for a template variable")


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplate:
    """Renders messages with the names that templates expect. Raises ModelUnavailable: the template is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            variables = find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ModelUnavailable(f"the model's chat template cannot be read: {error}") from error
        self.knows_tools = "tools" in variables
        self.knows_effort = not variables.isdisjoint(("reasoning_effort", "enable_thinking"))
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> str:
        """The prompt's text, up to where the assistant's answer starts or continues.

        Raises InvalidField: the template rejects the messages, or does not write the final message to be continued.
        """
        if not self.knows_tools:
            messages = _without_tools(messages, options.tools)
        if options.continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
        names = {**self._special_tokens, **options.variables, "add_generation_prompt": options.add_generation_prompt}
        if options.tools:
            names["tools"] = options.tools
        try:
            text = self._template.render(messages=messages, **names)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            roles = [message["role"] for message in messages[:8]]
            raise InvalidField("messages", roles, f"refused by the model's chat template: {error}") from error
        if not options.continue_final_message:
            return text
        end = text.rfind(_END)
        if end < 0:
            raise InvalidField("continue_final_message", True, "the model's chat template does not write the final message")
        return text[:end]


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """From ``chat_template.jinja``, else ``tokenizer_config.json``, else None. Raises ModelUnavailable: invalid files."""
    config_path = folder / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    except ValueError as error:
        raise ModelUnavailable(f"{config_path} is not valid JSON: {error}") from error
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # named templates, for tools and retrieval
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` etc., each a string or an object with the string as ``content``."""
    values = {name: config.get(name) for name in _SPECIAL}
    spelled = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: value for name, value in spelled.items() if isinstance(value, str)}


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text for training; prompts ignore it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # Jinja's own filter escapes HTML


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _without_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages that any template can render: tools in the system message, calls and their results as text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    instructions = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        system = plain.pop(0)
        instructions = f"{system['content']}\n\n{instructions}"
    return [{"role": "system", "content": instructions}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return kept | {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    if calls:
        kept["content"] = "\n".join([*filter(None, [message["content"]]), *calls])
    return kept


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


Message = Mapping[str, Any]

# Unicode noncharacters, which occur in no text. The first one (U+FDD0) marks the end of a final message.
_MASKS = [chr(code) for code in range(0xFDD1, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's text. ``control_spans``: its control tokens; None: wherever the text spells one."""

    text: str
    control_spans: tuple[tuple[int, int], ...] | None = None


class ControlTokens:
    """The spellings of a tokenizer's control tokens."""

    def __init__(self, spellings: Collection[str]) -> None:
        longest_first = sorted(spellings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._edges = sorted({edge for spelling in spellings for edge in (spelling[0], spelling[-1])})
        self._edge = re.compile(f"[{re.escape(''.join(self._edges))}]" if self._edges else r"(?!)")

    def spans(self, text: str) -> tuple[tuple[int, int], ...]:
        """Start and end of each spelling in ``text``."""
        return tuple(match.span() for match in self._pattern.finditer(text))

    def prompt(self, template: ChatTemplate, messages: Sequence[Message], options: TemplateOptions) -> ChatPrompt:
        """The messages' prompt. Raises InvalidField: the template rejects them, or makes control tokens of their text."""
        text = template.render(messages, options)
        strings: list[str] = []

        def note(string: str) -> str:
            strings.append(string)
            return string

        _rewrite(messages, options, note)
        if not any(self._edge.search(string) for string in strings):
            return ChatPrompt(text)
        hide, show = self._mask([text, *strings])
        masked = template.render(*_rewrite(messages, options, lambda string: string.translate(hide)))
        own = self.spans(masked)
        if masked.translate(show) == text:
            return ChatPrompt(text, None if own == self.spans(text) else own)
        # The template depends on the messages' text: mask complete spellings only.
        names = [masked[begin:end] for begin, end in own]
        if any(self._pattern.search(string) for string in strings):
            hidden = _rewrite(messages, options, lambda string: self._pattern.sub(lambda m: m[0].translate(hide), string))
            masked = template.render(*hidden)
            text, own = masked.translate(show), self.spans(masked)
        else:
            own = self.spans(text)
        if [text[begin:end] for begin, end in own] != names:
            raise InvalidField("messages", len(messages), "the chat template makes control tokens from their text")
        return ChatPrompt(text, None if own == self.spans(text) else own)

    def _mask(self, texts: Sequence[str]) -> tuple[dict[int, str], dict[int, str]]:
        """A translation of each edge character to one that no text contains, and its inverse."""
        used = set().union(*map(set, texts))
        free = [mask for mask in _MASKS if mask not in used]
        if len(free) < len(self._edges):
            raise InvalidField("messages", len(texts), "hold too many of Unicode's noncharacters (U+FDD0 to U+FDEF)")
        pairs = list(zip(self._edges, free, strict=False))
        return {ord(edge): mask for edge, mask in pairs}, {ord(mask): edge for edge, mask in pairs}


def _rewrite(
    messages: Sequence[Message], options: TemplateOptions, change: Callable[[str], str]
) -> tuple[list[Message], TemplateOptions]:
    """Applies ``change`` to every string that a template can print: not to roles and names of variables."""

    def rewritten(value: Any) -> Any:
        match value:
            case str():
                return change(value)
            case Mapping():
                return {rewritten(name): rewritten(item) for name, item in value.items()}
            case list() | tuple():
                return [rewritten(item) for item in value]
        return value

    changed: list[Message] = [
        {name: item if name == "role" else rewritten(item) for name, item in one.items()} for one in messages
    ]
    variables = {name: rewritten(item) for name, item in options.variables.items()}
    return changed, replace(options, variables=variables, tools=rewritten(options.tools))
