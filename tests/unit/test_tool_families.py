"""Calls in the forms of model families: recorded answers, random calls, random text, and recognition by the template."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import pytest

from cluster.config import ReasoningParser, ToolCallParser
from deploy.api.answer_parts import Arguments, CallStart, Part, Reasoning, Text, merged
from deploy.api.chat_template import ChatTemplate
from deploy.api.messages import Tool
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from deploy.api.tool_formats.forms import CALL_FORMS
from deploy.api.tool_formats.harmony import HarmonyParser
from deploy.api.tools import REASONING, AnswerForm
from tests.support.api import fast_tokenizer

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "filter": {"$ref": "#/$defs/Filter"},
    "exact": {"type": "boolean"},
    "codes": {"type": "array", "items": {"type": "string"}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Filter": {"type": "object"}}}
NAMES = ("get_weather", "math.add-2")
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name, "parameters": PARAMETERS}}) for name in NAMES]


def parse(form: str, pieces: Sequence[str]) -> list[Part]:
    parser = CALL_FORMS[form].parser(TOOLS)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.end()])


def call(name: str, arguments: str, index: int = 0, call_id: str | None = None) -> list[Part]:
    return [CallStart(index, name, call_id), Arguments(index, arguments)]


DSML = "｜DSML｜"
PARIS = '{"city": "Paris", "days": 2}'
WEATHER = call("get_weather", PARIS)
CALLED: dict[str, tuple[str, str, list[Part]]] = {
    "gpt-oss": (
        "openai",
        "<|channel|>analysis<|message|>Need <weather>.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        [Reasoning("Need <weather>."), *WEATHER],
    ),
    "gpt-oss, recipient first": (
        "openai",
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}",
        WEATHER,
    ),
    "gpt-oss, preamble": (
        "openai",
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>analysis<|message|>a<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>It is < 5.",
        [Text("I look it up."), Reasoning("a\nb"), Text("\nIt is < 5.")],
    ),
    "gpt-oss, no channel": ("openai", "Just text.", [Text("Just text.")]),
    "gpt-oss, a tool of others": (
        "openai",
        '<|channel|>commentary to=functions.other<|message|>{"a": 1}<|call|>',
        [Text('{"a": 1}')],
    ),
    "gpt-oss, no arguments": (
        "openai",
        "<|channel|>commentary to=functions.get_weather<|message|><|call|>",
        call("get_weather", "{}"),
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>math.add-2\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Text("Let me see."), *WEATHER, *call("math.add-2", "{}", 1)],
    ),
    "DeepSeek V3.1": (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>math.add-2<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*WEATHER, *call("math.add-2", "{}", 1)],
    ),
    "DeepSeek V3.2": (
        "deepseek_v32",
        f'Yes.\n\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
        [Text("Yes."), *WEATHER],
    ),
    "Kimi K2": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_call_begin|>functions.math.add-2:4<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [*call("get_weather", PARIS, 0, "functions.get_weather:3"), *call("math.add-2", "{}", 1, "functions.math.add-2:4")],
    ),
    "GLM-4.5": (
        "glm45",
        "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>math.add-2\n</tool_call>\n",
        [Text("Sure."), *WEATHER, *call("math.add-2", "{}", 1)],
    ),
    "GLM-4.7": (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        WEATHER,
    ),
    "Qwen3-Coder": (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        [Text("I look."), *WEATHER],
    ),
    "Qwen3-Coder, values of Python": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=unit>\nNone\n</parameter>\n"
        "<parameter=codes>\n['a\"', 'b']\n</parameter>\n<parameter=city>\n\n\n</parameter>\n</function>\n</tool_call>",
        call("get_weather", '{"exact": true, "unit": null, "codes": ["a\\"", "b"], "city": "\\n"}'),
    ),
    "MiniMax M2": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="math.add-2">\n</invoke>\n</minimax:tool_call>',
        [*WEATHER, *call("math.add-2", "{}", 1)],
    ),
    "Granite": (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now"}}]',
        [*WEATHER, *call("now", "{}", 1)],
    ),
    "Llama 4": (
        "pythonic",
        "<|python_start|>[get_weather(city='Paris', days=2), math.add-2()]<|python_end|>",
        [*WEATHER, *call("math.add-2", "{}", 1), Text("<|python_end|>")],
    ),
    "Gemma 3, a list": (
        "pythonic",
        '[get_weather(city="""a\n\'b""", exact=False, codes=(\'x\', ), filter={\'a\': [None, -1.5]})]',
        call("get_weather", '{"city": "a\\n\'b", "exact": false, "codes": ["x"], "filter": {"a": [null, -1.5]}}'),
    ),
    "Gemma 3": (
        "gemma3",
        'Okay.\n```tool_code\nget_weather(city="Paris", days=2)\nmath.add-2()\n```\n',
        [Text("Okay."), *WEATHER, *call("math.add-2", "{}", 1)],
    ),
    "OLMo 3": ("olmo3", '<function_calls>\nget_weather(city="Paris", days=2)\n</function_calls>', WEATHER),
}
# Answers with what looks like a call: they are content, every character of them.
TEXTS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get weather\n```json\n{}\n```",
    "deepseek_v31": "<｜tool▁calls▁begin｜> are tokens",
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="a b">\n</{DSML}invoke>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:x<|tool_call_argument_begin|>{}",
    "glm45": "A <tool_call> is <b>XML</b></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=a b>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>',
    "granite": "<|tool_call|> is a token",
    "pythonic": "[get_weather(city=a + b)] is Python, [1, 2] a list",
    "gemma3": "```tool_code\nprint(get_weather(city='a'))\n```",
}


@pytest.mark.parametrize(("form", "text", "expected"), CALLED.values(), ids=list(CALLED))
def test_recorded_calls_are_found_however_the_text_arrives(form: str, text: str, expected: list[Part]) -> None:
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected
    for cut in range(1, len(text)):
        assert parse(form, [text[:cut], text[cut:]]) == expected, text[:cut]


@pytest.mark.parametrize("form", TEXTS)
def test_what_is_no_call_is_content(form: str) -> None:
    text = TEXTS[form]
    assert parse(form, [text]) == parse(form, list(text)) == [Text(text)]


# ---- random calls


def _in_json(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _elements(arguments: Mapping[str, Any], element: str, around: str = "") -> str:
    """``element`` takes the key, whether the value is a string, and the value."""
    return "\n".join(
        element.format(key, str(isinstance(value, str)).lower(), around + _plain(value) + around)
        for key, value in arguments.items()
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


Written = Callable[[str, Mapping[str, Any]], str]
JSON: Callable[[Any], str] = json.dumps
WRITTEN: dict[str, Written] = {
    "hermes": lambda name, a: f"<tool_call>\n{_in_json(name, a)}\n</tool_call>",
    "granite": lambda name, a: f"<|tool_call|>[{_in_json(name, a)}]",
    "llama3_json": lambda name, a: json.dumps({"name": name, "parameters": a}),
    "mistral": lambda name, a: f"[TOOL_CALLS] [{_in_json(name, a)}]",
    "mistral_v11": lambda name, a: f"[TOOL_CALLS]{name}[ARGS]{JSON(a)}",
    "openai": lambda name, a: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{JSON(a)}<|call|>",
    "deepseek_v3": lambda name, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{JSON(a)}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda name, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{JSON(a)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": lambda name, a: (
        f'<{DSML}function_calls>\n<{DSML}invoke name="{name}">\n'
        + _elements(a, f'<{DSML}parameter name="{{0}}" string="{{1}}">{{2}}</{DSML}parameter>')
        + f"\n</{DSML}invoke>\n</{DSML}function_calls>"
    ),
    "kimi_k2": lambda name, a: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{JSON(a)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "glm45": lambda name, a: (
        f"<tool_call>{name}\n{_elements(a, '<arg_key>{0}</arg_key>' + chr(10) + '<arg_value>{2}</arg_value>')}\n</tool_call>"
    ),
    "qwen3_coder": lambda name, a: (
        f"<tool_call>\n<function={name}>\n"
        f"{_elements(a, '<parameter={0}>{2}</parameter>', chr(10))}\n</function>\n</tool_call>"
    ),
    "minimax_m2": lambda name, a: (
        f'<minimax:tool_call>\n<invoke name="{name}">\n'
        + _elements(a, '<parameter name="{0}">{2}</parameter>')
        + "\n</invoke>\n</minimax:tool_call>"
    ),
    "pythonic": lambda name, a: f"[{_python(name, a)}]",
    "gemma3": lambda name, a: f"```tool_code\n{_python(name, a)}\n```",
    "olmo3": lambda name, a: f"<function_calls>\n{_python(name, a)}\n</function_calls>",
}
_STRINGS = (
    "",
    "Paris",
    ' "quoted" ',
    "it's",
    "line\nbreak\r\n\n",
    "\\n \\",
    "東京 🙂",
    "{[(",
    "</",
    "<b>&amp;</b>",
    "null",
    "2",
    "]",
)


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(5 if depth > 2 else 7)
    if kind == 5:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {_string(rng): _value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return (_string(rng), rng.randrange(-99, 10**12), rng.choice((0.5, -1e-7, 1e20)), rng.random() < 0.5, None)[kind]


def _string(rng: random.Random) -> str:
    return "".join(rng.choices(_STRINGS, k=rng.randrange(4)))


def _arguments(rng: random.Random) -> dict[str, Any]:
    """Values of the declared types: the others cannot be told from strings where they are plain text."""
    values = {
        "city": _string(rng),
        "days": rng.randrange(-9, 9),
        "unit": rng.choice(("C", None)),
        "filter": {_string(rng): _value(rng)},
        "exact": rng.random() < 0.5,
        "codes": [_value(rng) for _ in range(rng.randrange(3))],
    }
    keys = rng.sample(sorted(values), rng.randrange(len(values) + 1))
    return {key: values[key] for key in keys}


def _pieces(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("form", WRITTEN)
def test_random_calls_are_read_as_they_were_written(form: str) -> None:
    rng = random.Random(form)
    for _ in range(40):
        name, arguments = rng.choice(NAMES), _arguments(rng)
        text = WRITTEN[form](name, arguments)
        for pieces in ([text], list(text), _pieces(rng, text)):
            start, read = parse(form, pieces)
            assert isinstance(start, CallStart)
            assert isinstance(read, Arguments)
            assert (start.name, json.loads(read.text)) == (name, arguments), text


@pytest.mark.parametrize("form", WRITTEN)
def test_random_text_never_fails_and_is_never_lost(form: str) -> None:
    """Damaged calls too: without a call in it, the content is the text, and pieces never matter."""
    rng = random.Random(form)
    whole = WRITTEN[form]("get_weather", {"city": "a", "days": 1})
    for _ in range(120):
        at, to = sorted(rng.choices(range(len(whole) + 1), k=2))
        inserted = rng.choice(("", "x", "<", '"', "{", "\n", ")", "<|end|>", whole[: rng.randrange(len(whole))]))
        text = rng.choice(("", "Hi. ")) + whole[:at] + inserted + whole[to:]
        parts = parse(form, [text])
        assert parse(form, list(text)) == parse(form, _pieces(rng, text)) == parts, text
        if form != "openai" and not any(isinstance(part, CallStart) for part in parts):
            assert "".join(part.text for part in parts if isinstance(part, Text)) == text


@pytest.mark.parametrize("form", sorted(WRITTEN.keys() - {"pythonic", "gemma3", "olmo3"}))
def test_names_and_arguments_are_passed_on_as_they_arrive(form: str) -> None:
    text = WRITTEN[form]("get_weather", {"city": "a" * 100})
    parser = CALL_FORMS[form].parser(TOOLS)
    seen: list[tuple[int, Part]] = [(at, part) for at, char in enumerate(text) for part in parser.feed(char)]
    begin = text.index("a" * 100)
    assert next(at for at, part in seen if isinstance(part, CallStart)) <= begin
    arrived = [at for at, part in seen if isinstance(part, Arguments) and begin <= at < begin + 100]
    assert len(arrived) == 100


@pytest.mark.parametrize("begun", ["<tool_call>name", "<tool_call>name\n<arg_key>city</arg_key>"])
def test_whitespace_without_end_is_not_held_back(begun: str) -> None:
    parser = CALL_FORMS["glm45"].parser(TOOLS)
    assert any(parser.feed(piece) for piece in [begun, *[" " * 100] * 20])


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_that_is_cut_says_so_and_keeps_its_text(form: str) -> None:
    text = WRITTEN[form]("get_weather", {"city": "abcdefgh"})
    cut = text[: text.index("def")]
    parser = CALL_FORMS[form].parser(TOOLS)
    parts = merged([*parser.feed(cut), *parser.end()])
    if any(isinstance(part, CallStart) for part in parts):
        assert parser.is_cut
        assert isinstance(parts[-1], Arguments)
        assert parts[-1].text.endswith("abc")
    else:
        assert parts == [Text(cut)]


def test_a_parser_of_channels_goes_on_where_the_prompt_ends() -> None:
    text = "so<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    parser = HarmonyParser((), "reasoning")
    assert parser.is_reasoning
    assert [*parser.feed(text), *parser.end()] == [Reasoning("so"), Text("Yes.")]
    assert [*HarmonyParser((), "answer").feed("on.")] == [Text("on.")]


# ---- recognition

TEMPLATES = {
    "openai": "<|start|>assistant<|channel|>analysis<|message|>{{ m }}<|end|> to=functions.",
    "deepseek_v3": "<think></think> <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>\\n```json\\n",
    "deepseek_v31": "<think></think> <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜>",
    "deepseek_v32": "<think></think> <｜DSML｜function_calls><｜DSML｜invoke name=",
    "deepseek_v4": "<think></think> <｜DSML｜tool_calls><｜DSML｜invoke name=",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "glm45": "<think></think> <tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>",
    "minimax_m2": "<think></think> <minimax:tool_call><invoke name=",
    "qwen3_coder": "<tool_call><function=example_function_name><parameter=example_parameter_1>",
    "mistral": "[TOOL_CALLS] [",
    "mistral_v11": "[THINK] [/THINK] [TOOL_CALLS]{{ name }}[ARGS]",
    "granite": "<|tool_call|>",
    "hermes": "<tool_call></tool_call>",
    "olmo3": "<function_calls>",
    "gemma3": "```tool_code",
    "pythonic": "<|python_start|> [func_name1(params_name1=params_value1)]",
    "llama3_json": '<|python_tag|> {"name": function name, "parameters": dictionary}',
}


def form_of(source: str, **settings: Any) -> AnswerForm:
    template = ChatTemplate("{% raw %}" + source + "{% endraw %}{{ tools }}", {})
    return AnswerForm.of(Tokenizer(fast_tokenizer(), template), ApiSettings(**settings))


@pytest.mark.parametrize("name", TEMPLATES)
def test_forms_are_recognised_by_the_chat_template(name: str) -> None:
    found = form_of(TEMPLATES[name])
    assert found.calls is CALL_FORMS[name]
    expected = {"openai": "openai_gptoss", "mistral_v11": "mistral"}.get(name, "qwen3")
    has_reasoning = "think>" in TEMPLATES[name] or name in ("openai", "mistral_v11")
    assert found.reasoning == (REASONING[expected] if has_reasoning else None)
    assert found.on_channels == (name == "openai")
    assert form_of(TEMPLATES[name], tool_call_parser="none", reasoning_parser="none").calls is None


def test_the_file_names_the_forms_that_there_are() -> None:
    assert set(get_args(ToolCallParser)) == {"none", *CALL_FORMS}
    assert set(get_args(ReasoningParser)) == {"none", *REASONING}
