"""Grammars of answers with tool calls and reasoning, and that their calls are parsed."""

import json
import re
from collections.abc import Collection
from typing import Any

import pytest
import xgrammar

from cluster.errors import InvalidField
from cluster.sampling_params import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from deploy.api.answer_parts import Arguments, CallStart, Opening, merged
from deploy.api.errors import ApiError
from deploy.api.messages import Tool
from deploy.api.tool_formats.forms import CALL_FORMS, HARMONY
from deploy.api.tool_formats.parameters import Parameters
from deploy.api.tool_formats.python_call import json_of_literal
from deploy.api.tools import REASONING, THINK, AnswerForm, ToolUse
from engine.grammar.tag_rules import checked_tag

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
MARKERS = (*sorted({marker for form in CALL_FORMS.values() for marker in form.markers}), *THINK)
IDS = {marker: EOS + 1 + i for i, marker in enumerate(MARKERS)}
# As `engine.grammar.vocabulary` spells them: 256 one-byte tokens, the end, and special tokens that are no text.
VOCABULARY = [*(bytes([i]) for i in range(256)), b"", *(b"\xff%d" % i for i in IDS.values())]
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, vocab_size=len(VOCABULARY), stop_token_ids=[EOS]),
    max_threads=1,
)
DSML = "｜DSML｜"
HARMONY_CALL = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s"
# A call, what separates two, and what stands before the first and after the last.
FORMS: dict[str, tuple[str, str, str, str]] = {
    "hermes": ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n", "", ""),
    "mistral": ('{"name": "%s", "arguments": %s}', ", ", "[TOOL_CALLS] [", "]"),
    "mistral_v11": ("[TOOL_CALLS]%s[ARGS]%s", "", "", ""),
    "llama3_json": ('{"name": "%s", "parameters": %s}', "; ", "", ""),
    "granite": ('{"name": "%s", "arguments": %s}', ", ", "<|tool_call|>[", "]"),
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v32": (
        f'<{DSML}invoke name="%s">\n%s</{DSML}invoke>',
        "\n",
        f"<{DSML}function_calls>\n",
        f"\n</{DSML}function_calls>",
    ),
    "glm45": ("<tool_call>%s\n%s</tool_call>", "\n", "", ""),
    "qwen3_coder": ("<tool_call>\n<function=%s>\n%s</function>\n</tool_call>", "\n", "", ""),
    "minimax_m2": ('<invoke name="%s">\n%s</invoke>', "\n", "<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    "pythonic": ("%s(%s)", ", ", "[", "]"),
    "gemma3": ("%s(%s)", "\n", "```tool_code\n", "\n```"),
}
# One argument where it is not JSON. In `deepseek_v32` it is a string.
ELEMENTS = {
    "deepseek_v32": f'<{DSML}parameter name="%s" string="true">%s</{DSML}parameter>\n',
    "glm45": "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
    "qwen3_coder": "<parameter=%s>%s</parameter>\n",
    "minimax_m2": '<parameter name="%s">%s</parameter>\n',
    "pythonic": '%s="%s"',
    "gemma3": '%s="%s"',
}


def arguments_in(form: str, **arguments: str) -> str:
    if form not in ELEMENTS:
        return json.dumps(arguments)
    return "".join(ELEMENTS[form] % item for item in arguments.items())


def calls_in(form: str, *calls: tuple[str, dict[str, str]]) -> str:
    call, separator, begin, end = FORMS[form]
    written = [call % (name, arguments_in(form, **arguments)) for name, arguments in calls]
    # A tool without a schema may be called with any arguments, as an object that is unpacked.
    return f"{begin}{separator.join(written)}{end}"


def accepts(asked: tuple[str, Grammar] | None, text: str, special: Collection[str] = ()) -> bool:
    """Whether the grammar takes all of the text, its special markers as tokens, and an end after it."""
    assert asked is not None
    _, grammar = asked
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(grammar.source))
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    token_ids = [i for piece in pieces for i in ([IDS[piece]] if piece in special else piece.encode())]
    return all(matcher.accept_token(i) for i in token_ids) and matcher.accept_token(EOS)


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("thinks", [False, True], ids=["", "thinks"])
@pytest.mark.parametrize("form", FORMS)
def test_what_each_choice_of_tools_allows(form: str, thinks: bool, special: bool) -> None:
    markers = (*CALL_FORMS[form].markers, *(THINK if thinks else ())) if special else ()
    ids = {marker: IDS[marker] for marker in markers}
    answers = AnswerForm(CALL_FORMS[form], THINK if thinks else None, marker_ids=ids)
    opening: Opening = "either" if thinks else "answer"
    good = calls_in(form, ("get_weather", {"city": "Paris"}))
    texts = {
        "a call": good,
        "a call without arguments": calls_in(form, ("now", {})),
        "wrong arguments": calls_in(form, ("get_weather", {"town": "Paris"})),
        "unknown tool": calls_in(form, ("other", {})),
        "two calls": calls_in(form, ("get_weather", {"city": "Paris"}), ("now", {})),
        "text": "Just { text",
        "empty": "",
        "text, then a call": f"Let me see. {good}",
    }
    if form in ("pythonic", "gemma3"):
        texts["two calls"] = texts["two calls"].replace("now()", "now(**{})")
        texts["a call without arguments"] = texts["a call without arguments"].replace("now()", "now(**{})")

    def allowed(use: ToolUse) -> set[str]:
        asked = answers.grammar(use, opening, None)
        for begin in ("<think>{Well}</think>", "<think>Well.\n</think>\n\n") if thinks else ():
            assert accepts(asked, begin + good, markers)
        return {name for name, text in texts.items() if accepts(asked, text, markers)}

    tools = (WEATHER, NOW)
    one = {"a call", "a call without arguments"}
    chosen = {*one, "text", "empty", "text, then a call"}
    assert allowed(ToolUse(tools, parallel=False)) == chosen
    assert allowed(ToolUse(tools)) == {*chosen, "two calls"}
    if form in ("pythonic", "gemma3"):  # a forced call is written without the braces
        texts = {name: text.replace("**{}", "") for name, text in texts.items()}
    assert allowed(ToolUse(tools, forced=True, parallel=False)) == one
    assert allowed(ToolUse(tools, forced=True)) == {*one, "two calls"}


@pytest.mark.parametrize("form", FORMS)
def test_what_the_grammar_allows_is_parsed(form: str) -> None:
    new_parser = AnswerForm(CALL_FORMS[form]).new_parser(ToolUse((WEATHER, NOW)), "answer")
    assert new_parser is not None
    parser = new_parser()
    text = calls_in(form, ("get_weather", {"city": "Paris"}), ("now", {}))
    parts = merged([*parser.feed(text), *parser.end()])
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["get_weather", "now"]
    assert [json.loads(part.text) for part in parts if isinstance(part, Arguments)] == [{"city": "Paris"}, {}]
    assert not parser.is_cut


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
def test_calls_and_answers_on_channels(special: bool) -> None:
    markers = HARMONY.markers if special else ()
    ids = {marker: IDS[marker] for marker in markers}
    answers = AnswerForm(HARMONY, REASONING["openai_gptoss"], on_channels=True, marker_ids=ids)
    call, thought = HARMONY_CALL % ("get_weather", PARIS), "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    wrong, final = HARMONY_CALL % ("get_weather", "{}"), "<|channel|>final<|message|>"

    def allowed(use: ToolUse, asked: tuple[str, Grammar] | None = None) -> list[str]:
        grammar = answers.grammar(use, "either", asked)
        texts = [call, wrong, f"{final}Text.", f"{final}{PARIS}", PARIS]
        found = [text for text in texts if accepts(grammar, text, markers)]
        assert found == [text for text in texts if accepts(grammar, thought + text, markers)]
        return found

    asked = ("response_format", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PARAMETERS)))
    assert allowed(ToolUse((WEATHER,), forced=True)) == [call]
    assert allowed(ToolUse((WEATHER,))) == [call, f"{final}Text.", f"{final}{PARIS}"]
    assert allowed(ToolUse(), asked) == [f"{final}{PARIS}"]
    assert allowed(ToolUse((WEATHER,)), asked) == [call, f"{final}{PARIS}"]
    opened = answers.grammar(ToolUse((WEATHER,), forced=True), "reasoning", None)
    assert accepts(opened, f"Hm.<|end|><|start|>assistant{call}", markers)


@pytest.mark.parametrize("strict", [True, False], ids=["forced", "auto"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ELEMENTS])
def test_arguments_are_written_on_one_line_as_json_dumps_does(form: str, strict: bool) -> None:
    asked = AnswerForm(CALL_FORMS[form]).grammar(ToolUse((WEATHER,), forced=strict, parallel=False), "answer", None)
    assert asked is not None
    compiled = COMPILER.compile_structural_tag(checked_tag(asked[1].source)[0])

    def takes(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(i) for i in text.encode()) and matcher.accept_token(EOS)

    text = calls_in(form, ("get_weather", {"city": "Paris"}))
    assert PARIS in text
    assert takes(text)
    for spelled in (
        '{ "city": "Paris"}',
        '{\n"city": "Paris"}',
        '{"city":"Paris"}',
        '{"city": "Paris" }',
        '{"city" : "Paris"}',
    ):
        assert not takes(text.replace(PARIS, spelled)), spelled


ITSELF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": ITSELF}, "$defs": {"a": {"anyOf": [ITSELF] * 9}}},  # 9 ** 8 alternatives
        {"properties": {"a": {"type": [["string"]]}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": "string", "minLength": "x"}}},
        {"properties": {"a": {"type": "string", "maxLength": 1.5}}},
        {"properties": {"a": {"type": "string", "pattern": 5}}},
        {"properties": [1]},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {}}, "required": [1]},
        {"properties": {f"a{i}": {"type": "string"} for i in range(900)}, "$defs": {"b": {"description": "b" * 999}}},
        {
            "properties": {f"a{i}": {"$ref": "#/$defs/b"} for i in range(9000)},
            "$defs": {"b": {"anyOf": [{"minLength": 1}] * 250}},
        },
    ],
)
@pytest.mark.parametrize("form", sorted(CALL_FORMS))
def test_no_schema_of_a_client_ends_the_making_of_a_grammar(form: str, schema: dict[str, Any]) -> None:
    """A schema that is none becomes part of the grammar, whose check refuses it; a large one is refused by its length."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}})
    try:
        asked = AnswerForm(CALL_FORMS[form]).grammar(ToolUse((tool,), forced=True), "answer", None)
    except (ApiError, InvalidField):
        return
    assert asked is not None
    assert len(asked[1].source) <= MAX_GRAMMAR_CHARS


def test_alternatives_that_refer_to_themselves_are_read_to_an_end() -> None:
    """Also of a tool whose calls are not enforced, when the model calls it."""
    nullable = {"anyOf": [{"type": "string"}, {"type": ["integer", "null"]}]}
    properties = {"a": ITSELF, "b": {"$ref": "#/$defs/b"}}
    known = Parameters({"properties": properties, "$defs": {"a": {"anyOf": [ITSELF] * 9}, "b": nullable}})
    assert known.types("a") == frozenset()
    with pytest.raises(InvalidField):
        known.alternatives(ITSELF)
    assert known.types("b") == {"string", "integer", "null"}
    kinds = [one["type"] for one in known.alternatives(properties["b"])]
    assert kinds == ["string", ["integer", "null"]], "in their order"


def test_what_can_be_read_of_a_schema_is_read_at_once() -> None:
    """Not when the model calls the tool, which is on the event loop: a part may take long to read."""
    properties = {"bad": {"type": "text"}, "a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/b"}, "c": {"type": "integer"}}
    schema = {"properties": properties, "$defs": {"a": {"type": "boolean"}, "b": {"type": "text"}}}
    known = Parameters(schema)
    properties.clear()
    types = [known.types(key) for key in ("bad", "a", "b", "c", "d")]
    assert types == [frozenset(), {"boolean"}, frozenset(), {"integer"}, frozenset()]


def test_a_long_number_is_read_once() -> None:
    """Not from each of its digits again: the pattern gives no digit back."""
    assert json_of_literal("1" * 100_000 + "x") is None
    assert json_of_literal("1" * 4000) == "1" * 4000


def test_no_grammar_where_nothing_is_enforced() -> None:
    assert AnswerForm().grammar(ToolUse((LOOSE, NOW)), "answer", None) is None
    assert AnswerForm().grammar(ToolUse(), "answer", None) is None


def test_a_text_of_llama_begins_neither_with_a_brace_nor_with_its_marker() -> None:
    asked = AnswerForm(CALL_FORMS["llama3_json"]).grammar(ToolUse((WEATHER,)), "answer", None)
    for text in ('{"city": 1}', ' {"city": 1}', '<|python_tag|>{"city": 1}'):
        assert not accepts(asked, text)
    for text in ("<", "<p>", "\n\n- a", "[{"):
        assert accepts(asked, text)


def test_one_named_tool() -> None:
    asked = AnswerForm().grammar(ToolUse((NOW,), forced=True, parallel=False), "answer", None)
    call = FORMS["hermes"][0]
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
    form, field_and_grammar = AnswerForm(reasoning=THINK), ("response_format", asked)
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
    assert accepts(found, FORMS["hermes"][0] % ("now", "{}"))
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
    for form, use, opening in (
        (AnswerForm(), ToolUse((NOW,)), "answer"),
        (AnswerForm(reasoning=THINK), ToolUse(), "either"),
    ):
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
