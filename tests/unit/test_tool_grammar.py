"""Grammars of answers with tool calls and reasoning, and that their calls are parsed."""

import json
import re
from collections.abc import Collection
from typing import Any

import pytest
import xgrammar

from cluster.grammar import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from deploy.api.answer_parts import CallStart
from deploy.api.errors import ApiError
from deploy.api.messages import Tool
from deploy.api.tools import REASONING, AnswerForm, Opening, ToolUse

PARIS = '{"city": "Paris"}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool.model_validate(
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
)
NOW = Tool.model_validate({"type": "function", "function": {"name": "now"}})
LOOSE = Tool.model_validate({"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}})

EOS = 256
MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", *REASONING)
IDS = {marker: EOS + 1 + i for i, marker in enumerate(MARKERS)}
# As `engine.grammar.vocabulary` spells them: 256 one-byte tokens, the end, and special tokens that are no text.
VOCABULARY = [*(bytes([i]) for i in range(256)), b"", *(b"\xff%d" % i for i in IDS.values())]
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, vocab_size=len(VOCABULARY), stop_token_ids=[EOS]),
    max_threads=1,
)
# Form, whether Mistral's newer one, markers that are special tokens, a call, and what separates two.
FORMS: dict[str, tuple[str, bool, tuple[str, ...], str, str]] = {
    "hermes": ("hermes", False, (), '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n"),
    "hermes, special": (
        "hermes",
        False,
        ("<tool_call>", "</tool_call>"),
        '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
        "\n",
    ),
    "mistral": ("mistral", False, (), '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]', ", "),
    "mistral, special": (
        "mistral",
        False,
        ("[TOOL_CALLS]",),
        '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]',
        ", ",
    ),
    "mistral 11": ("mistral", True, (), "[TOOL_CALLS]%s[ARGS]%s", ""),
    "mistral 11, special": ("mistral", True, ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]%s[ARGS]%s", ""),
    "llama3_json": ("llama3_json", False, (), '{"name": "%s", "parameters": %s}', "; "),
}


def accepts(asked: tuple[str, Grammar] | None, text: str, special: Collection[str] = ()) -> bool:
    """Whether the grammar takes all of the text, its special markers as tokens, and an end after it."""
    assert asked is not None
    _, grammar = asked
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(grammar.source))
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    token_ids = [i for piece in pieces for i in ([IDS[piece]] if piece in special else piece.encode())]
    return all(matcher.accept_token(i) for i in token_ids) and matcher.accept_token(EOS)


def two_calls(form: str) -> str:
    _, with_args, _, call, separator = FORMS[form]
    first, second = call % ("get_weather", PARIS), call % ("now", "{}")
    if form.startswith("mistral") and not with_args:  # one list
        return f"{first[:-1]}{separator}{second.removeprefix('[TOOL_CALLS] [')}"
    return f"{first}{separator}{second}"


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_each_choice_of_tools_allows(form: str, thinks: bool) -> None:
    calls, with_args, special, call, _ = FORMS[form]
    special += REASONING if thinks and special else ()
    answers = AnswerForm(calls, with_args, thinks, marker_ids={marker: IDS[marker] for marker in special})
    opening: Opening = "either" if thinks else "answer"
    good = call % ("get_weather", PARIS)
    texts = {
        "a call": good,
        "wrong arguments": call % ("get_weather", '{"town": "Paris"}'),
        "unknown tool": call % ("other", "{}"),
        "unlisted argument of a tool that is not strict": call % ("now", '{"zone": 1}'),
        "two calls": two_calls(form),
        "text": "Just { text",
        "empty": "",
        "text, then a call": f"Let me see. {good}",
    }

    def allowed(use: ToolUse) -> set[str]:
        asked = answers.grammar(use, opening, None)
        for begin in ("<think>{Well}</think>", "<think>Well.\n</think>\n\n") if thinks else ():
            assert accepts(asked, begin + good, special)
        return {name for name, text in texts.items() if accepts(asked, text, special)}

    tools = (WEATHER, NOW)
    chosen = {"a call", "unlisted argument of a tool that is not strict", "text", "empty", "text, then a call"}
    assert allowed(ToolUse(tools, forced=True, parallel=False)) == {"a call"}
    assert allowed(ToolUse(tools, forced=True)) == {"a call", "two calls"}
    assert allowed(ToolUse(tools, parallel=False)) == chosen
    assert allowed(ToolUse(tools)) == {*chosen, "two calls"}


@pytest.mark.parametrize("form", FORMS)
def test_what_the_grammar_allows_is_parsed(form: str) -> None:
    calls, with_args, *_ = FORMS[form]
    new_parser = AnswerForm(calls, with_args).new_parser(ToolUse((WEATHER, NOW)), "answer")
    assert new_parser is not None
    parser = new_parser()
    parts = [*parser.feed(two_calls(form)), *parser.end()]
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["get_weather", "now"]
    assert not parser.is_cut


def test_no_grammar_where_nothing_is_enforced() -> None:
    assert AnswerForm().grammar(ToolUse((LOOSE, NOW)), "answer", None) is None
    assert AnswerForm().grammar(ToolUse(), "answer", None) is None


def test_a_text_of_llama_begins_neither_with_a_brace_nor_with_its_marker() -> None:
    asked = AnswerForm("llama3_json").grammar(ToolUse((WEATHER,)), "answer", None)
    for text in ('{"city": 1}', ' {"city": 1}', '<|python_tag|>{"city": 1}'):
        assert not accepts(asked, text)
    for text in ("<", "<p>", "\n\n- a", "[{"):
        assert accepts(asked, text)


def test_one_named_tool() -> None:
    asked = AnswerForm().grammar(ToolUse((NOW,), forced=True, parallel=False), "answer", None)
    call = FORMS["hermes"][3]
    assert accepts(asked, call % ("now", "{}"))
    assert not accepts(asked, call % ("now", '{"zone": 1}')), "a forced call matches also where it is not strict"
    assert not accepts(asked, call % ("get_weather", PARIS))


ASKED = [
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PARAMETERS)),
    Grammar(GrammarKind.JSON_OBJECT),
    Grammar(GrammarKind.REGEX, r'\{"city": "[A-Z][a-z]+"\}'),
    Grammar(GrammarKind.EBNF, 'root ::= "{" [^}]+ "}"'),
    Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"format": {"type": "const_string", "value": PARIS}})),
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda grammar: str(grammar.kind))
def test_a_grammar_begins_after_the_reasoning(asked: Grammar) -> None:
    form, field_and_grammar = AnswerForm(thinks=True), ("response_format", asked)
    assert form.grammar(ToolUse(), "answer", field_and_grammar) is field_and_grammar
    opened = form.grammar(ToolUse(), "reasoning", field_and_grammar)
    assert accepts(opened, f'It is "Paris", is it?</think>{PARIS}')
    assert accepts(opened, f"Well.\n</think>\n\n{PARIS}")
    assert not accepts(opened, PARIS)
    assert not accepts(opened, f"Well.</think>Well. {PARIS}")
    either = form.grammar(ToolUse(), "either", field_and_grammar)
    assert accepts(either, PARIS)
    assert accepts(either, f"<think>Well.</think>{PARIS}")
    assert not accepts(either, f"Well.</think>{PARIS}")


@pytest.mark.parametrize("asked", ASKED, ids=lambda grammar: str(grammar.kind))
def test_tools_may_be_called_instead_of_an_answer_of_a_grammar(asked: Grammar) -> None:
    found = AnswerForm().grammar(ToolUse((LOOSE, NOW)), "answer", ("response_format", asked))
    assert accepts(found, PARIS)
    assert accepts(found, FORMS["hermes"][3] % ("now", "{}"))
    assert not accepts(found, "Just text.")


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, '{"items":', "is not JSON"),
        (GrammarKind.JSON_SCHEMA, "[" * 50_000, "is not JSON"),
        (GrammarKind.STRUCTURAL_TAG, "{}", "must be an object with"),
        (GrammarKind.STRUCTURAL_TAG, "5", "must be an object with"),
        (GrammarKind.STRUCTURAL_TAG, "<", "is not JSON"),
    ],
)
def test_a_malformed_source_is_refused_where_it_becomes_part_of_another(kind: GrammarKind, source: str, reason: str) -> None:
    asked: tuple[str, Grammar] = ("guided_json", Grammar(kind, source))
    for form, use, opening in ((AnswerForm(), ToolUse((NOW,)), "answer"), (AnswerForm(thinks=True), ToolUse(), "either")):
        with pytest.raises(ApiError, match=f"guided_json: {reason}") as refused:
            form.grammar(use, "answer" if opening == "answer" else "either", asked)
        assert refused.value.param == "guided_json"


def test_tools_that_are_too_long_together_are_refused_by_name() -> None:
    described: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["é" * (MAX_GRAMMAR_CHARS // 10)]}}}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": f"f{i}", "parameters": described}}) for i in range(11)
    ]
    assert AnswerForm().grammar(ToolUse((*tools[:9],), forced=True), "answer", None) is not None
    with pytest.raises(ApiError, match=r"tools: must have at most") as refused:
        AnswerForm().grammar(ToolUse((*tools,), forced=True), "answer", None)
    assert refused.value.param == "tools"
