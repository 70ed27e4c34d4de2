"""How a call uses tools and reasoning: what its template is given, how its answer is parsed, and what grammar forces it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.grammar import Grammar, GrammarKind
from deploy.api.answer_parts import AnswerParser, PlainText
from deploy.api.chat_template import ChatTemplate
from deploy.api.errors import bad_request
from deploy.api.messages import NamedTool, Tool
from deploy.api.schema import ChatRequest
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from deploy.api.tool_parsers import TOOL_PARSERS

Format = dict[str, Any]  # of xgrammar's structural tags

REASONING = ("<think>", "</think>")
_MARKERS = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", *REASONING, "<tool_call>", "</tool_call>")
_TAIL_TOKENS = 16  # of a prompt, in which reasoning may begin or end


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Of one call. ``tools``: those that the model may call."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False  # at least one is called
    parallel: bool = True

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar is needed."""
        return self.forced or (bool(self.tools) and (not self.parallel or any(tool.function.strict for tool in self.tools)))


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How answers of the served model are written.

    Args:
        calls: name of the form of tool calls (`tool_parsers`); None: not known.
        with_args: Mistral's newer form, ``[TOOL_CALLS]name[ARGS]{...}``.
        thinks: answers may begin with reasoning.
        always: they begin with it, whatever the prompt ends with.
    """

    calls: str | None = "hermes"
    with_args: bool = False
    thinks: bool = False
    always: bool = False
    marker_ids: dict[str, int] = field(default_factory=dict)  # special tokens that are markers

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: ApiSettings) -> "AnswerForm":
        """As configured, or as the chat template shows."""
        template = tokenizer.chat_template
        source = "" if template is None else template.source
        calls = settings.tool_call_parser
        reasoning = settings.reasoning_parser
        return cls(
            calls=None if calls == "none" else _form_in(template) if calls is None else calls,
            with_args="[ARGS]" in source,
            thinks=REASONING[1] in source if reasoning is None else reasoning != "none",
            always=reasoning == "deepseek_r1",
            marker_ids={marker: i for marker in _MARKERS if (i := tokenizer.special_id(marker)) is not None},
        )

    def use_of(self, fields: ChatRequest) -> ToolUse:
        """Raises ApiError: a choice of tools that are not given, or tools for a model whose calls cannot be parsed."""
        choice = fields.tool_choice
        if not fields.tools:
            if choice not in (None, "none", "auto"):
                raise bad_request("tool_choice", "is allowed only with tools")
            return ToolUse()
        if choice == "none":
            return ToolUse()
        if self.calls is None:
            raise bad_request("tools", "are not supported: the form of this model's calls is not known (tool_call_parser)")
        tools = tuple(fields.tools)
        if isinstance(choice, NamedTool):
            tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
            if not tools:
                raise bad_request("tool_choice.function.name", f"{choice.function.name[:64]!r} is none of the tools")
        if choice == "required" or isinstance(choice, NamedTool):
            # One, unless more are asked for: small models repeat a forced call without end.
            return ToolUse(tools, True, bool(fields.parallel_tool_calls) and choice == "required")
        return ToolUse(tools, False, fields.parallel_tool_calls is not False)

    def new_parser(self, use: ToolUse, opening: "Opening") -> Callable[[], AnswerParser] | None:
        """Makes a parser for each choice of a call; None: answers are content alone."""
        thinks = self.thinks and opening != "answer"
        if not use.tools and not thinks:
            return None
        names = [tool.function.name for tool in use.tools]
        form = TOOL_PARSERS[self.calls] if use.tools and self.calls else None
        return lambda: AnswerParser(
            PlainText() if form is None else form(names), REASONING if thinks else None, is_open=opening == "reasoning"
        )

    def opening(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> "Opening":
        """What an answer to the prompt begins with."""
        if not self.thinks:
            return "answer"
        tail = tokenizer.text_of(prompt_ids[-_TAIL_TOKENS:]).rstrip()
        if tail.endswith(REASONING[1]):
            return "answer"
        return "reasoning" if self.always or tail.endswith(REASONING[0]) else "either"

    def grammar(self, use: ToolUse, opening: "Opening", asked: tuple[str, Grammar] | None) -> tuple[str, Grammar] | None:
        """The grammar of the whole answer, and the field that asks for it.

        Args:
            asked: of the content. Reasoning before it is free, and tools may be called instead.
        """
        field = "tools"
        if use.forced:
            content = self._calls_only(use)
        elif asked is not None:
            field = asked[0]
            if not use.tools and (not self.thinks or opening == "answer"):
                return asked
            content = _format_of(asked[1])
            if use.tools:
                content = {"type": "or", "elements": [self._calls_only(use), content]}
        elif use.is_constrained and (trigger := self._trigger()) is not None:
            tags = [self._call_tag(tool, forced=False) for tool in use.tools]
            content = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not use.parallel}
        else:
            return None
        parts = [*self._reasoning_format(opening), content]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts} if len(parts) > 1 else content}
        return field, Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))

    def _reasoning_format(self, opening: "Opening") -> list[Format]:
        if not self.thinks or opening == "answer":
            return []
        begin = "" if opening == "reasoning" else REASONING[0]
        thought = {
            "type": "tag",
            "begin": begin,
            "content": {"type": "any_text"},
            "end": [f"{REASONING[1]}\n\n", REASONING[1]],
        }
        return [thought if begin == "" else {"type": "optional", "content": thought}]

    def _calls_only(self, use: ToolUse) -> Format:
        """One call or more that match the tools' schemas, and no other text."""
        separator = {"llama3_json": "; ", "mistral": "" if self.with_args else ", "}.get(self.calls or "", "\n")
        calls: Format = {
            "type": "tags_with_separator",
            "tags": [self._call_tag(tool, forced=True) for tool in use.tools],
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": not use.parallel,
        }
        if self.calls != "mistral" or self.with_args:
            return calls
        return {"type": "sequence", "elements": [*self._marker("[TOOL_CALLS]"), _const(" ["), calls, _const("]")]}

    def _trigger(self) -> str | None:
        """What begins a call in free text; None: text does not, where it is a special token or an opening brace."""
        trigger = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(self.calls or "")
        return None if trigger in self.marker_ids or self.with_args else trigger

    def _call_tag(self, tool: Tool, *, forced: bool) -> Format:
        function, key = tool.function, "parameters" if self.calls == "llama3_json" else "arguments"
        schema = function.arguments if forced or function.strict else {"type": "object"}
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
        head = f'{{"name": {json.dumps(function.name)}, "{key}": '
        match self.calls:
            case "mistral" if self.with_args:
                elements = [*self._marker("[TOOL_CALLS]"), _const(function.name), *self._marker("[ARGS]"), content]
                return {"type": "tag", "begin": "", "content": {"type": "sequence", "elements": elements}, "end": ""}
            case "mistral" if not forced:
                return {"type": "tag", "begin": f"[TOOL_CALLS] [{head}", "content": content, "end": "}]"}
            case "hermes":
                return {"type": "tag", "begin": f"<tool_call>\n{head}", "content": content, "end": "}\n</tool_call>"}
        return {"type": "tag", "begin": head, "content": content, "end": "}"}

    def _marker(self, marker: str) -> list[Format]:
        token_id = self.marker_ids.get(marker)
        return [_const(marker) if token_id is None else {"type": "token", "token": token_id}]


Opening = Literal["answer", "reasoning", "either"]


def _form_in(template: ChatTemplate | None) -> str | None:
    """The form of calls that a template teaches. One that knows no tools is given `tool_prompts`."""
    if template is None:
        return None
    source = template.source
    if not template.knows_tools:
        return "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source:
        return "hermes"
    if "<|python_tag|>" in source or '"parameters": ' in source:
        return "llama3_json"
    return None


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _format_of(grammar: Grammar) -> Format:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": 1}
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": json.loads(grammar.source), "max_whitespace_cnt": 1}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.source}
        case GrammarKind.STRUCTURAL_TAG:
            found: Format = json.loads(grammar.source)["format"]
            return found
