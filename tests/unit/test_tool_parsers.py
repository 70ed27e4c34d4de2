"""Tool calls and reasoning in answers: what is found, and that it does not depend on how the text arrives."""

import random
from collections.abc import Sequence

import pytest

from deploy.api.answer_parts import AnswerParser, Arguments, CallStart, Part, PlainText, Reasoning, Text, merged
from deploy.api.messages import Tool
from deploy.api.tool_formats.forms import CALL_FORMS

THINK = ("<think>", "</think>")
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("add", "get_weather")]


def parse(form: str, pieces: Sequence[str], reasoning: bool = False, is_open: bool = False) -> list[Part]:
    tools = CALL_FORMS[form].parser(TOOLS) if form else PlainText()
    parser = AnswerParser(tools, THINK if reasoning else None, is_open=is_open)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.end()])


def call(name: str, arguments: str, index: int = 0) -> list[Part]:
    return [CallStart(index, name), Arguments(index, arguments)]


WEATHER = '{"city": "Paris \\"}<tool_call>", "days": [1, {"x": 2}]}'
HERMES = {
    "text": ("just an answer", [Text("just an answer")]),
    "one": (f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', call("get_weather", WEATHER)),
    "after text": (
        'Let me see.\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        [Text("Let me see."), *call("add", '{"a": 1}')],
    ),
    "two": (
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n'
        '<tool_call>{"arguments": {"a": 2} , "name":"add" }</tool_call>',
        [*call("add", "{}"), *call("add", '{"a": 2}', 1)],
    ),
    "a list": (
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": {}}]</tool_call>',
        [*call("add", '{"a": 1}'), *call("b", "{}", 1)],
    ),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', call("add", "{}")),
    "null arguments": ('<tool_call>{"name": "add", "arguments": null}</tool_call>', call("add", "{}")),
    "arguments as a string": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call("add", '{"a": 1}'),
    ),
    "text after it": ('<tool_call>{"name": "add"}</tool_call> done', [*call("add", "{}"), Text(" done")]),
    "text instead of its end": ('<tool_call>{"name": "add"} [see note], ok', [*call("add", "{}"), Text(" [see note], ok")]),
    "arguments twice": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {"b": 2}, "arguments": "{}"}</tool_call>',
        call("add", '{"a": 1}'),
    ),
    "never closed": ('<tool_call>{"name": "add", "arguments": {"a": 1}}', call("add", '{"a": 1}')),
    "cut in the arguments": ('<tool_call>{"name": "add", "arguments": {"a": ', call("add", '{"a": ')),
    "cut before the name": ('<tool_call>{"nam', [Text('<tool_call>{"nam')]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', [Text('<tool_call>{"arguments": {}}</tool_call>')]),
    "no JSON": ("a <tool_call> is a tag</tool_call>", [Text("a <tool_call> is a tag</tool_call>")]),
    "broken JSON": ('<tool_call>{name: "add"}</tool_call>', [Text('<tool_call>{name: "add"}</tool_call>')]),
    "a marker that is none": ("<tool_cat> <tool_", [Text("<tool_cat> <tool_")]),
    "a call after broken text": (
        'x <tool_call>y <tool_call>{"name": "add"}</tool_call>',
        [Text("x <tool_call>y"), *call("add", "{}")],
    ),
}
LLAMA = {
    "text": ("just an answer", [Text("just an answer")]),
    "one": ('{"name": "add", "parameters": {"a": 1}}', call("add", '{"a": 1}')),
    "tagged": ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', call("add", '{"a": 1}')),
    "two": (
        '{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {}}',
        [*call("add", "{}"), *call("get_weather", "{}", 1)],
    ),
    "a person": ('{"name": "Alice", "parameters": {}}', [Text('{"name": "Alice", "parameters": {}}')]),
    "no parameters": ('{"name": "add"} is JSON', [Text('{"name": "add"} is JSON')]),
    "JSON later": ('see {"name": "add", "parameters": {}}', [Text('see {"name": "add", "parameters": {}}')]),
    "code": ("<|python_tag|>print(1)", [Text("<|python_tag|>print(1)")]),
}
MISTRAL = {
    "text": ("just [an] answer", [Text("just [an] answer")]),
    "a list": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": {}}]',
        [*call("add", '{"a": 1}'), *call("b", "{}", 1)],
    ),
    "version 11": ('Sure.[TOOL_CALLS]add{"a": [1]}', [Text("Sure."), *call("add", '{"a": [1]}')]),
    "version 13": (
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]123[ARGS]{"b": "}"}',
        [*call("add", '{"a": 1}'), *call("get_weather", '{"b": "}"}', 1)],
    ),
    "no call": ("[TOOL_CALLS] what is that?", [Text("[TOOL_CALLS] what is that?")]),
}
CASES = {
    **{f"hermes, {name}": ("hermes", *case) for name, case in HERMES.items()},
    **{f"llama, {name}": ("llama3_json", *case) for name, case in LLAMA.items()},
    **{f"mistral, {name}": ("mistral", *case) for name, case in MISTRAL.items()},
}


@pytest.mark.parametrize(("form", "text", "expected"), CASES.values(), ids=list(CASES))
def test_calls_are_found_however_the_text_arrives(form: str, text: str, expected: list[Part]) -> None:
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), min(3, len(text) - 1)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(form, pieces) == expected


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nfirst\n\nthen\n</think>\n\nThe answer.", False, [Reasoning("first\n\nthen"), Text("The answer.")]),
        ("first</think>The answer.", True, [Reasoning("first"), Text("The answer.")]),
        ("<think>\n\n</think>\n\nThe answer.", False, [Text("The answer.")]),
        ("The <think>answer</think>.", False, [Text("The <think>answer</think>.")]),
        ("<think>cut </thi", False, [Reasoning("cut </thi")]),
        ("<thi", False, [Text("<thi")]),
        ('a</think>\n\n<tool_call>{"name": "add", "arguments": {}}</tool_call>', True, [Reasoning("a"), *call("add", "{}")]),
        ("a</think> b </think> c", True, [Reasoning("a"), Text("b </think> c")]),
        ("<tool_call>{", True, [Reasoning("<tool_call>{")]),
    ],
)
def test_reasoning_is_split_off_however_it_arrives(text: str, is_open: bool, expected: list[Part]) -> None:
    for form in ("", "hermes"):
        if form or not any(isinstance(part, CallStart) for part in expected):
            assert parse(form, [text], True, is_open) == expected
            assert parse(form, list(text), True, is_open) == expected


@pytest.mark.slow
def test_nothing_is_lost_of_random_text() -> None:
    """Content, reasoning markers aside, is the text itself where there is no call; and pieces never matter."""
    rng = random.Random(1)
    alphabet = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"name"',
        ":",
        '"add"',
        '"arguments"',
        ",",
        " ",
        "\n",
        "[",
        "]",
        "x",
    ]
    alphabet += ["[TOOL_CALLS]", "<|python_tag|>", ";", '"parameters"', '\\"', "<", "</think>", "<think>"]
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 16)))
        for form in ("hermes", "llama3_json", "mistral"):
            for reasoning, is_open in ((False, False), (True, False), (True, True)):
                whole = parse(form, [text], reasoning, is_open)
                assert parse(form, list(text), reasoning, is_open) == whole, (form, text)
                if not reasoning and not any(isinstance(part, CallStart) for part in whole):
                    assert "".join(part.text for part in whole if isinstance(part, Text)) == text, (form, text)


def test_whitespace_before_text_that_is_no_call_is_kept() -> None:
    parser = CALL_FORMS["hermes"].parser([])
    parts = [part for piece in ["<tool_call>", *["    "] * 100, "text"] for part in parser.feed(piece)]
    assert merged([*parts, *parser.end()]) == [Text("<tool_call>" + " " * 400 + "text")]


def test_a_name_that_never_begins_its_arguments_is_text() -> None:
    parser = CALL_FORMS["mistral"].parser([])
    parts = [part for piece in ["[TOOL_CALLS]name[", *["1234567890"] * 30] for part in parser.feed(piece)]
    assert parts, "nothing was released before the end"
    assert merged([*parts, *parser.end()]) == [Text("[TOOL_CALLS]name[" + "1234567890" * 30)]
