"""Random answers of the grammars of random tools: all of them are calls whose arguments match the schema."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar

from cluster.errors import InvalidField
from deploy.api.answer_parts import Arguments, CallStart, merged
from deploy.api.errors import ApiError
from deploy.api.messages import Tool
from deploy.api.tool_formats.forms import CALL_FORMS
from deploy.api.tools import AnswerForm, ToolUse
from engine.grammar.compiling import CompiledGrammar
from engine.grammar.tag_rules import checked_tag
from engine.grammar.vocabulary import GrammarVocabulary

EOS = 256
NUM_SCHEMAS = 16
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
STRINGS: tuple[dict[str, Any], ...] = (
    {},
    {"minLength": 1, "maxLength": 3},
    {"minLength": 70, "maxLength": 200},
    {"maxLength": 0},
    {"pattern": "^[A-Z]+$"},
    {"pattern": r"^.\S*\d[^a]$"},
    {"pattern": "^(<a>|b|</)+$"},
    *({"format": kind} for kind in ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname")),
)
VALUES = (
    *("Paris", "東京", "", " a ", "\n\nb", "5", "null", "True", "[1]", '{"a', "a<b"),
    *(7, -2, None, True, ["</arg_value>"], {"<": 1}),
)
KEYS = ("a", "b", "city", "a b", " a", "a<b", "a>", 'a"b', "é", "日本", "class", "a=b", "</parameter>", "", "x" * 130)
SPELLED = """
</arg_value> </parameter> </｜DSML｜parameter> </tool_call> </function> </invoke> </ < <|end|> <|call|> <|start|>assistant
<|channel|> <|tool_call_end|> <｜tool▁call▁end｜> <tool_call> [TOOL_CALLS] [ARGS] <|tool_call|> ``` </function_calls> ) ")
null None true 5 1e999 [1 ["a {"a { ] }} ' " \\" \\ \\u003c \\n , :
"""
PIECES = [*SPELLED.split(), "\n", " ", ", ", ": ", "\n</parameter>", "\n```"]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 3 else 5)
    if kind < 2:
        return {"type": "string", **rng.choice(STRINGS)}
    if kind < 5:
        values = {"enum": rng.sample(VALUES, rng.randint(1, 3))}
        scalar = {"type": rng.choice(("integer", "number", "boolean", "null"))}
        return (values, scalar, {"type": "integer", "minimum": 3})[kind - 2]
    match kind:
        case 5 | 6:
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case 7:
            return {
                "type": ["string", rng.choice(("null", "integer", "array"))],
                "maxLength": 5,
                "items": {"type": "number"},
            }
        case 8:
            return rng.choice(
                ({}, {"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree/properties/of"}, {"allOf": [{"$ref": "#/$defs/code"}]})
            )
        case 9:
            return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 3}
    return random_object(rng, depth + 1)


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "object", "additionalProperties": random_schema(rng, depth + 1)}
    properties = {key: random_schema(rng, depth) for key in ["a", *rng.sample(KEYS[1:4] if rng.random() < 0.6 else KEYS, 2)]}
    required = rng.sample(sorted(properties), rng.randint(0, len(properties)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_answer(grammar: CompiledGrammar, markers: Sequence[str], rng: random.Random) -> str | None:
    """Text of the grammar, with markers and parts of values where it allows them. None: no end was found.

    Args:
        markers: of the form, first that after a value.
    """
    matcher, masks, spelled = xgrammar.GrammarMatcher(grammar.compiled), grammar.vocabulary.new_masks(1), b""
    closers, num_free = ('"', "}", "]", markers[0], f"\n{markers[0]}"), rng.randrange(1, 60)
    for _ in range(1500):
        grammar.fill(matcher, masks)
        allowed = grammar.vocabulary.allowed_bytes(masks[0].numpy()).tolist()
        if not allowed:
            return spelled.decode()
        num_free -= len(allowed) > 1
        if num_free <= 0 and num_free % 40 == 0:
            end = grammar.follow(grammar.vocabulary.tokens_of(spelled)).shortest_end()
            if end is not None:
                return (spelled + end).decode()
        text = rng.choice(rng.choice((PIECES, markers)) if num_free > 0 else closers).encode()
        if len(allowed) == 1 or rng.random() < 0.4 or not matcher.accept_string(text):
            text = bytes([rng.choice([i for i in allowed if 32 <= i < 127] or allowed)])
            assert matcher.accept_string(text)
        spelled += text
    return None


@pytest.fixture(scope="module")
def vocabulary(tiny_model_folder: Path) -> GrammarVocabulary:
    return GrammarVocabulary(tiny_model_folder, 257, (EOS,))


@pytest.mark.slow
@pytest.mark.parametrize("form", sorted({id(form): name for name, form in CALL_FORMS.items()}.values()))
def test_random_answers_of_a_grammar_are_valid_calls(form: str, vocabulary: GrammarVocabulary) -> None:
    """However they are cut, and whatever markers they hold as text."""
    elements = CALL_FORMS[form].elements
    markers = [*((elements.value_end, elements.end) if elements else ()), *CALL_FORMS[form].markers]
    rng, num_answers = random.Random(form), 0
    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1)
    for _ in range(NUM_SCHEMAS):
        defs = {"tree": {"type": "object", "properties": {"of": {"$ref": "#/$defs/tree"}}}, "code": {"type": "string"}}
        schema = {**random_object(rng), "$defs": defs}
        tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
        try:
            asked = AnswerForm(CALL_FORMS[form]).grammar(ToolUse((tool,), forced=True, parallel=False), "answer", None)
            assert asked is not None
            source, names, counts_chars = checked_tag(asked[1].source)
        except (ApiError, InvalidField):
            continue
        native = compiler.compile_structural_tag(source)
        grammar = CompiledGrammar(asked[1], native, vocabulary, names, counts_chars)
        for text in filter(None, [random_answer(grammar, markers, rng) for _ in range(4)]):
            cuts = sorted(rng.sample(range(len(text) + 1), 5))
            several = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            parsed = []
            for pieces in ([text], list(text), several):
                parser = CALL_FORMS[form].parser([tool])
                parsed.append(merged([*(part for piece in pieces for part in parser.feed(piece)), *parser.end()]))
                assert not parser.is_cut
            assert parsed[0] == parsed[1] == parsed[2], text
            match parsed[0]:
                case [CallStart(0, "f"), Arguments(0, arguments)]:
                    jsonschema.validate(json.loads(arguments), schema, format_checker=FORMATS)
                case _:
                    pytest.fail(f"{text!r} is no call: {parsed[0]}")
            num_answers += 1
    assert num_answers > NUM_SCHEMAS, "the test refuses most"
