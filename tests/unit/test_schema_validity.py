"""Whatever a grammar of a schema lets pass is valid under another project's validator: on random walks under the masks, and
for texts that spell names, strings and numbers in other ways."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar
from engine.grammar.compiling import CompiledGrammar, Grammars
from tests.support.grammars import EOS, schema_grammar, tag_grammar, takes

HEAD = "call "
NUM_WALKED, NUM_SPELLED = 60, 200  # schemas
NAMES = ("a", "ab", "a.b", "é", "日本", "😀", "ÿ", "a/b", 'q"t', "n\nl", "\\", "\u0001", "", " ", "$ref", "a-b", "^]")
VALUES = (
    1,
    0,
    -1,
    1.0,
    -0.0,
    1e5,
    0.1,
    1e-7,
    2**62,
    "a",
    "é",
    'a"b',
    "\\n",
    "/",
    "\u2028",
    None,
    True,
    [],
    {},
    [1],
    {"a": 1},
)
BOUNDS = (0, 1, -1, 10, 99, -100, 1e3, 12345, 0.0, 2.5, -1.5, 0.001)


def in_a_tag(schema: Any) -> Grammar:
    parts = [{"type": "const_string", "value": HEAD}, {"type": "json_schema", "json_schema": schema}]
    return tag_grammar({"type": "sequence", "elements": parts})


alone = schema_grammar


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: {"type": "string", **rng.choice(({}, {"format": rng.choice(("date", "time", "ipv4", "uuid"))}))},
        lambda: {"const": rng.choice(VALUES)},
        lambda: {"enum": rng.sample(VALUES, 3)},
        lambda: {"type": rng.choice(("integer", "number")), **_bounds(rng)},
        lambda: rng.choice(({"type": ["string", "null"]}, {"type": "boolean"}, {"type": "object"}, {}, True)),
    ]
    if depth < 3:
        makers += [lambda: _object(rng, depth)] * 3
        makers += [
            lambda: {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 2)},
            lambda: {"type": "array", "prefixItems": [random_schema(rng, depth + 1)], "items": rng.choice((False, {}))},
            lambda: {rng.choice(("anyOf", "oneOf")): [random_schema(rng, depth + 1) for _ in range(2)]},
            lambda: {"allOf": [_object(rng, depth + 1), _object(rng, depth + 1)]},
        ]
    return rng.choice(makers)()


def _bounds(rng: random.Random) -> dict[str, Any]:
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return {key: rng.choice(BOUNDS) for key in keys if rng.random() < 0.3}


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(NAMES, rng.randint(0, 4))
    others = rng.choice(({}, {"additionalProperties": random_schema(rng, depth + 1)}, {"additionalProperties": False}))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": [n for n in names if rng.random() < 0.5], **others}


def compiled_schemas(grammars: Grammars, form: Callable[[Any], Grammar], num: int) -> list[tuple[Any, CompiledGrammar]]:
    found: list[tuple[Any, CompiledGrammar]] = []
    for seed in range(num):
        schema = random_schema(random.Random(seed))
        try:
            found.append((schema, grammars.compile(form(schema))))
        except InvalidField:
            continue  # no value matches it, or it cannot be enforced
    assert len(found) > num // 2
    return found


def faults(schema: Any, text: str) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text))]


@pytest.mark.parametrize("form", [alone, in_a_tag])
def test_random_walks_under_the_masks_end_valid(grammars: Grammars, form: Callable[[Any], Grammar]) -> None:
    num_ended = 0
    for schema, compiled in compiled_schemas(grammars, form, NUM_WALKED):
        rng = random.Random(len(compiled.grammar.source))
        for _ in range(2):
            text = walk(compiled, rng, 100)
            if text is not None:
                num_ended += 1
                text = text.removeprefix(HEAD)
                assert not faults(schema, text), (schema, text)
                if (
                    all(char.isascii() and char not in "\\.eE" for char in text) and "-0" not in text
                ):  # strings and numbers have one spelling
                    assert text == json.dumps(json.loads(text, object_pairs_hook=_Pairs), ensure_ascii=False), text
    assert num_ended > NUM_WALKED // 2


class _Pairs(dict[str, Any]):
    """Writes names that are given twice as they are: no grammar can tell all names apart from those before."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self._pairs = pairs

    def items(self) -> Any:
        return self._pairs


def walk(compiled: CompiledGrammar, rng: random.Random, max_tokens: int) -> str | None:
    """An output of random allowed bytes, most of them special in JSON; None: it did not end in time."""
    state, spelled, out = compiled.follow((), max_tokens), compiled.vocabulary.token_bytes, b""
    for num_left in range(max_tokens, 0, -1):
        mask = state.masks([], 0, (), 0)[0].numpy()
        allowed = [i for i in range(EOS + 1) if mask[i // 32] >> (i % 32) & 1]
        special = [i for i in allowed if spelled[i] and spelled[i] in b'\\u"0123456789.-eE']
        chosen = (
            EOS
            if EOS in allowed and rng.random() < 0.3
            else rng.choice(special if special and rng.random() < 0.5 else allowed)
        )
        (token_id,) = state.end_in_time([], 0, [chosen], num_left)
        if token_id == EOS:
            return out.decode(errors="replace")
        state.advance([token_id])
        out += spelled[token_id]
    return None


@pytest.mark.slow
def test_no_other_spelling_escapes_a_rule(grammars: Grammars) -> None:
    num_taken = 0
    for schema, compiled in compiled_schemas(grammars, alone, NUM_SPELLED):
        rng = random.Random(len(compiled.grammar.source))
        for _ in range(30):
            text = spelled_anyhow(rng, schema)
            if takes(compiled, text):
                num_taken += 1
                assert not faults(schema, text), (schema, text)
    assert num_taken > NUM_SPELLED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [alone, in_a_tag])
def test_a_declared_name_in_any_spelling_is_no_additional_name(
    grammars: Grammars, name: str, form: Callable[[Any], Grammar]
) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    head = HEAD if form is in_a_tag else ""
    compiled = grammars.compile(form(schema))

    def takes_member(spelled: str, value: str) -> bool:
        return takes(compiled, f"{head}{{{spelled}: {value}}}")

    escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 2**16 else json.dumps(char)[1:-1] for char in name)
    for spelled in {json.dumps(name), json.dumps(name, ensure_ascii=False), f'"{escaped}"', f'"{escaped.upper()}"'}:
        if json_or_none(spelled) == name:
            assert not takes_member(spelled, '"a"'), spelled
    assert takes_member(json.dumps(name, ensure_ascii=False), "1")
    for other in ("x", "aa", "abb", "日", "aé", "😀😀", "a.", "ÿé"):
        assert takes_member(f'"{other}"', '"a"'), other


def json_or_none(spelled: str) -> Any:
    try:
        return json.loads(spelled)
    except ValueError:
        return None


def spelled_anyhow(rng: random.Random, schema: Any, depth: int = 0) -> str:
    """A text that nearly matches, with names, strings and numbers in other spellings, and values of other properties."""
    if schema is True or schema == {} or depth > 4 or rng.random() < 0.05:
        return _value(rng, rng.choice(VALUES))
    if "allOf" in schema:
        return spelled_anyhow(rng, rng.choice(schema["allOf"]), depth)
    for kind in ("anyOf", "oneOf"):
        if kind in schema:
            return spelled_anyhow(rng, rng.choice(schema[kind]), depth)
    if "const" in schema or "enum" in schema:
        return _value(rng, schema["const"] if "const" in schema else rng.choice(schema["enum"]))
    match schema["type"]:
        case "integer" | "number":
            bounds = [value for key, value in schema.items() if key != "type"] or [5]
            return _value(rng, rng.choice(bounds) + rng.choice((0, 0, 1, -1, 0.5, 1e-6)))
        case "array":
            items = [*schema.get("prefixItems", ()), *[schema["items"]] * rng.randint(0, 2)]
            return f"[{', '.join(spelled_anyhow(rng, one, depth + 1) for one in items if one is not False)}]"
        case "object":
            others = schema.get("additionalProperties", False)
            named = [(name, one) for name, one in schema.get("properties", {}).items() if rng.random() < 0.8]
            named += [(rng.choice((*schema.get("properties", {}), "zz")), others) for _ in range(2) if others is not False]
            return f"{{{', '.join(f'{_value(rng, name)}: {spelled_anyhow(rng, one, depth + 1)}' for name, one in named)}}}"
    return _value(rng, rng.choice(("abc", "é", "1999-02-03", None, True)))


def _value(rng: random.Random, value: Any) -> str:
    if isinstance(value, str):
        chars = [json.dumps(char, ensure_ascii=False)[1:-1] for char in value]
        spelled = (
            f"\\u{ord(c):04x}" if rng.random() < 0.25 and ord(c) < 2**16 else one
            for c, one in zip(value, chars, strict=True)
        )
        return f'"{"".join(spelled)}"'
    if isinstance(value, int) and not isinstance(value, bool):
        return rng.choice((str(value), f"{value}.0", f"{value}e0", f"{value * 10}e-1", f"0{value}"))
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    "pattern", ["^(?:b(?:cc*))?$", "^(b(c+))?$", "^(?:b(?:cc*)|e)?$", "^(?:(?:b(?:cc*)))?x$", "^(bc*)?x?$"]
)
def test_an_optional_group_is_taken_as_a_whole(grammars: Grammars, pattern: str) -> None:
    compiled = grammars.compile(alone({"type": "string", "pattern": pattern}))
    for text in ("", "b", "c", "e", "x", "bc", "cc", "cx", "bcc", "bcx", "bccx"):
        assert takes(compiled, f'"{text}"') == bool(re.fullmatch(pattern, text)), text
