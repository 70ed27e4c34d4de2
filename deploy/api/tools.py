"""How a call uses tools and reasoning: what its template is given, how its answer is parsed, and what grammar forces it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.sampling_params import Grammar, GrammarKind
from deploy.api.answer_parts import AnswerParser, Opening, PlainText, ReasoningParser
from deploy.api.errors import bad_request
from deploy.api.messages import NamedTool, Tool
from deploy.api.schema import ChatRequest
from deploy.api.settings import ApiSettings
from deploy.api.structured import (
    ANY_TEXT,
    Format,
    any_of,
    arguments,
    format_of,
    grammar_named,
    marker_of,
    pattern,
    sequence,
    spelled,
    tag,
)
from deploy.api.tokenizer import Tokenizer
from deploy.api.tool_formats.forms import HARMONY, HERMES, CallForm, form_of, name_in
from deploy.api.tool_formats.harmony import CHANNEL, END, MESSAGE, START, HarmonyParser

_TAIL_TOKENS = 16  # of a prompt, in which reasoning may begin or end
# Markers of reasoning in front of an answer, by the name of its parser, which is vLLM's where it has one.
THINK = ("<think>", "</think>")
_OF_THINK = ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "glm47", "kimi_k2", "minimax_m2", "olmo3")
REASONING: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_OF_THINK, THINK),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "openai_gptoss": (f"{CHANNEL}analysis{MESSAGE}", END),
}


def _reasoning_in(source: str) -> str:
    """The name of the reasoning in a chat template; "none" without any."""
    if CHANNEL in source and MESSAGE in source:
        return "openai_gptoss"
    return next((name for name, (_, end) in REASONING.items() if end in source and end != END), "none")


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """The grammar of one call's tools, in the model's form of calls.

    Args:
        marker_ids: markers that are special tokens.
        parallel: several calls are possible.
    """

    form: CallForm
    marker_ids: Mapping[str, int]
    tools: Sequence[Tool]
    parallel: bool

    def calls(self, *, strict: bool = True) -> Format:
        """One call or more, and no other text.

        Args:
            strict: all arguments match their schemas, those of tools that are not strict included.
        """
        return sequence(self._calls(strict, ""))

    def text_or_calls(self) -> Format:
        """Any text, with or without calls. Arguments of strict tools match their schemas, others are objects."""
        form, trigger = self.form, marker_of(self.form.trigger, self.marker_ids)
        if not form.trigger:
            text = pattern(form.no_call) if form.no_call else ANY_TEXT
            return any_of([self.calls(strict=False), sequence([*self.spelled(form.text_begin), text])])
        calls, end = self._calls(False, form.trigger), None
        if form.end:  # a tag whose length has no bound must have one
            end = calls.pop()
        tagged = tag(trigger, sequence(calls), "" if end is None else end.get("value", end))
        kind, triggers = "triggered_tags", {"triggers": [trigger]}
        if not isinstance(trigger, str):
            kind, triggers = "token_triggered_tags", {"trigger_tokens": [trigger["token"]]}
        return {"type": kind, **triggers, "tags": [tagged], "stop_after_first": not self.parallel}

    def spelled(self, *pieces: str | Format) -> list[Format]:
        return spelled(pieces, self.marker_ids)

    def _calls(self, strict: bool, begun: str) -> list[Format]:
        """The pieces of calls after ``begun``."""
        form = self.form
        if not form.begin and begun:  # text may stand between calls
            return [any_of(self._tags(strict, begun))]
        several = {
            "type": "tags_with_separator",
            "tags": self._tags(strict, ""),
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not (self.parallel and form.repeats),
        }
        return [*self.spelled(form.begin.removeprefix(begun)), several, *self.spelled(form.end)]

    def _tags(self, strict: bool, begun: str) -> list[Format]:
        """A call of each tool."""
        tags = []
        for tool in self.tools:
            first, *others = self.form.pieces(tool, strict=strict or bool(tool.function.strict))
            *pieces, last = self.spelled(first.removeprefix(begun) if isinstance(first, str) else first, *others)
            is_end = last["type"] in ("const_string", "token")  # a tag whose length has no bound must have one
            tags.append(
                tag("", sequence(pieces), last.get("value", last)) if is_end else tag("", sequence([*pieces, last]), "")
            )
        return tags


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
        calls: the form of tool calls; None: not known.
        reasoning: begin and end of reasoning; None: answers have none.
        always: they begin with it, whatever the prompt ends with.
        on_channels: all of an answer is harmony's messages.
    """

    calls: CallForm | None = HERMES
    reasoning: tuple[str, str] | None = None
    always: bool = False
    on_channels: bool = False
    marker_ids: dict[str, int] = field(default_factory=dict)  # special tokens that are markers
    shown: frozenset[int] = frozenset()  # special tokens that the parser is to see

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: ApiSettings) -> "AnswerForm":
        """As configured, or as the chat template shows."""
        template = tokenizer.chat_template
        name = settings.tool_call_parser or name_in(template) or "none"
        thinks = settings.reasoning_parser or _reasoning_in("" if template is None else template.source)
        calls = None if name == "none" else form_of(name, template)
        on_channels = thinks == "openai_gptoss" or calls is HARMONY
        reasoning = REASONING.get("openai_gptoss" if on_channels else thinks)
        markers = {*(calls.markers if calls else ()), *(reasoning or ()), *(HARMONY.markers if on_channels else ())}
        marker_ids = {marker: i for marker in sorted(markers) if (i := tokenizer.special_id(marker)) is not None}
        inner = [tokenizer.special_id(marker) for marker in (calls.inner_markers if calls else ())]
        shown = frozenset([*marker_ids.values(), *(i for i in inner if i is not None)])
        return cls(calls, reasoning, thinks == "deepseek_r1", on_channels, marker_ids, shown)

    @property
    def reads_schemas(self) -> bool:
        """Whether arguments are not written as JSON, so that the schemas of tools are read here."""
        return self.calls is not None and self.calls.arguments is not arguments

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

    def new_parser(self, use: ToolUse, opening: Opening) -> Callable[[], ReasoningParser] | None:
        """Makes a parser for each choice of a call; None: answers are content alone."""
        if self.on_channels:
            return lambda: HarmonyParser(use.tools if self.calls is HARMONY else (), opening)
        markers = None if opening == "answer" else self.reasoning
        calls = self.calls if use.tools else None
        if calls is None and markers is None:
            return None
        return lambda: AnswerParser(
            PlainText() if calls is None else calls.parser(use.tools), markers, is_open=opening == "reasoning"
        )

    def opening(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Opening:
        """What an answer to the prompt begins with."""
        if self.reasoning is None:
            return "answer"
        tail = tokenizer.text_of(prompt_ids[-_TAIL_TOKENS:]).rstrip()
        begin, end = self.reasoning
        if self.on_channels:
            is_next = tail.endswith(f"{START}assistant")
            return "either" if is_next else "reasoning" if tail.endswith(begin) else "answer"
        if tail.endswith(end):
            return "answer"
        return "reasoning" if self.always or tail.endswith(begin) else "either"

    def grammar(self, use: ToolUse, opening: Opening, asked: tuple[str, Grammar] | None) -> tuple[str, Grammar] | None:
        """The grammar of the whole answer, and the field that asks for it.

        Args:
            asked: of the content. Reasoning before it is free, and tools may be called instead.

        Raises:
            ApiError: 400 naming the field, for a grammar that is too long or malformed.
        """
        if self.reads_schemas:
            for tool in use.tools:
                _ = tool.function.parameters_read  # here, where it is not on the event loop: the parser needs it
        field, tools = "tools", self._tool_grammar(use)
        if tools is not None and use.forced:
            content = tools.calls()
        elif asked is not None:
            field = asked[0]
            if tools is None and (self.reasoning is None or opening == "answer"):
                return asked
            content = sequence([*self._text_begin(opening), format_of(*asked)])
            if tools is not None:
                content = any_of([tools.calls(), content])
        elif tools is not None and use.is_constrained:
            content = tools.text_or_calls()
        else:
            return None
        whole = {"type": "structural_tag", "format": sequence([*self._reasoning_format(opening), content])}
        return field, grammar_named(field, GrammarKind.STRUCTURAL_TAG, json.dumps(whole, ensure_ascii=False))

    def _tool_grammar(self, use: ToolUse) -> ToolGrammar | None:
        if self.calls is None or not use.tools:
            return None
        return ToolGrammar(self.calls, self.marker_ids, use.tools, use.parallel)

    def _text_begin(self, opening: Opening) -> list[Format]:
        """What stands between reasoning and content."""
        if not self.on_channels or opening == "answer":
            return []
        return spelled([HARMONY.text_begin], self.marker_ids)

    def _reasoning_format(self, opening: Opening) -> list[Format]:
        if self.reasoning is None or opening == "answer":
            return []
        end = marker_of(self.reasoning[1], self.marker_ids)
        ends = [f"{end}\n\n", end] if isinstance(end, str) and not self.on_channels else end
        pieces: list[str | Format] = [tag("", ANY_TEXT, ends)]
        if self.on_channels:
            pieces.append(f"{START}assistant")
        elif not isinstance(end, str):  # the blank line after reasoning that a token ends
            pieces.append(pattern(r"(\n\n)?"))
        if opening == "reasoning":
            return spelled(pieces, self.marker_ids)
        thought = sequence(spelled([self.reasoning[0], *pieces], self.marker_ids))
        return [{"type": "optional", "content": thought}]
