"""How a call uses tools and reasoning: what its template is given, how its answer is parsed, and what grammar forces it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.grammar import Grammar, GrammarKind
from deploy.api.answer_parts import AnswerParser, PlainText
from deploy.api.chat_template import ChatTemplate
from deploy.api.errors import bad_request
from deploy.api.messages import NamedTool, Tool
from deploy.api.schema import ChatRequest
from deploy.api.settings import ApiSettings
from deploy.api.structured import grammar_named
from deploy.api.tokenizer import Tokenizer
from deploy.api.tool_grammar import Format, ToolGrammar, format_of, marker_of
from deploy.api.tool_parsers import TOOL_PARSERS

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

        Raises:
            ApiError: 400 naming the field, for a grammar that is too long or malformed.
        """
        field, tools = "tools", self._tool_grammar(use)
        if tools is not None and use.forced:
            content = tools.calls()
        elif asked is not None:
            field = asked[0]
            if tools is None and (not self.thinks or opening == "answer"):
                return asked
            content = format_of(*asked)
            if tools is not None:
                content = {"type": "or", "elements": [tools.calls(), content]}
        elif tools is not None and use.is_constrained:
            content = tools.text_or_calls()
        else:
            return None
        parts = [*self._reasoning_format(opening), content]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts} if len(parts) > 1 else content}
        return field, grammar_named(field, GrammarKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False))

    def _tool_grammar(self, use: ToolUse) -> ToolGrammar | None:
        if self.calls is None or not use.tools:
            return None
        return ToolGrammar(self.calls, self.with_args, self.marker_ids, use.tools, use.parallel)

    def _reasoning_format(self, opening: "Opening") -> list[Format]:
        if not self.thinks or opening == "answer":
            return []
        begin, end = (marker_of(marker, self.marker_ids) for marker in REASONING)
        thought = {
            "type": "tag",
            "begin": "" if opening == "reasoning" else begin,
            "content": {"type": "any_text"},
            "end": [f"{end}\n\n", end] if isinstance(end, str) else end,
        }
        return [thought if opening == "reasoning" else {"type": "optional", "content": thought}, *_after(end)]


def _after(end: str | Format) -> list[Format]:
    """The blank line after reasoning that a token ends."""
    return [] if isinstance(end, str) else [{"type": "regex", "pattern": r"(\n\n)?"}]


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
