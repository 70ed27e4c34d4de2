"""Strings with lengths, patterns and formats: every output is valid, and masks agree with grammars."""

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar
from engine.grammar.checking import refusal
from engine.grammar.compiling import CompiledGrammar, Grammars
from engine.grammar.json_pattern import json_spelling, plain_spelling
from engine.grammar.string_formats import FORMATS, LENGTHS
from engine.grammar.vocabulary import GrammarVocabulary
from tests.support.grammars import EOS, of_schema, schema_grammar, tag_grammar, takes
from tests.unit.test_schema_validity import walk

# Byte-level spellings (Ġ is a space): quotes with what is before and behind them, parts of escapes and of characters.
SPELLED = """
ab abc abcdefgh aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa a" ab" abc" "a "ab
", a", ab", "} a"} "}} "] a"] "" a"" Ġ"", Ġ"" ",Ġ" a",Ġ" ",Ġ"b":Ġ" ":Ġ" ":Ġ"a" {"a":Ġ" {"a":Ġ"ab ["a ["ab",Ġ"
\\n a\\n \\" \\"" a\\" \\\\ \\\\" \\u \\u0 \\u00 \\u00e9 \\ud83d \\ud83d\\ude00 \\ude00 a\\ \\x 00 e9" d83d de00 \\u00e9"
Ã Ã© aÃ ©a Ã©" ðŁĺĢ ðŁ ĺĢ ĺĢ" Ã©Ã©Ã©" nab tab" nul l, 12 -1 1} null, Ġ ĊĊ aĊ ač
"""


@pytest.fixture(scope="module")
def grammars(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of 256 one-byte tokens, the end of sequence, and longer tokens."""
    folder = tmp_path_factory.mktemp("longer")
    tokenizer = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    tokenizer.add_tokens(SPELLED.split())
    tokenizer.save(str(folder / "tokenizer.json"))
    found = Grammars(GrammarVocabulary(folder, tokenizer.get_vocab_size(), (EOS,)))
    assert max(map(len, found.vocabulary.token_bytes)) == 44
    return found


def allowed(grammar: CompiledGrammar, mask: torch.Tensor) -> list[int]:
    words = mask.numpy()
    return [i for i in range(grammar.vocabulary.size) if words[i // 32] >> (i % 32) & 1]


def string(choose: random.Random) -> dict[str, Any]:
    least = choose.choice((0, 0, 1, 2, 5, 40))
    most = choose.choice((None, least, least + 1, least + 3, least + 40, least + 70, 300))
    if choose.random() < 0.4:
        return {"type": "string", "pattern": f"^.{{{least},{'' if most is None else most}}}$"}
    return {"type": "string", **({"minLength": least} if least else {}), **({} if most is None else {"maxLength": most})}


def schema_of(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """Alternatives often begin alike, so that several bounds hold at once."""
    kind = choose.randrange(8 if depth < 3 else 3)
    if kind < 3:
        return (string, string, lambda _: {"enum": ["a", "abc", 'a"b', 12]})[kind](choose)
    if kind < 5:
        return {"anyOf": [schema_of(choose, depth + 1) for _ in range(2)]}
    if kind < 6:
        return {"type": "array", "items": schema_of(choose, depth + 1), "maxItems": 3}
    names = choose.sample(("a", "b"), choose.randint(1, 2))
    extra = {"additionalProperties": choose.choice((False, string(choose)))}
    return {
        "type": "object",
        "properties": {name: schema_of(choose, depth + 1) for name in names},
        "required": names[:1],
        **extra,
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_outputs_of_bounded_strings_are_valid_at_every_step(grammars: Grammars, seed: int) -> None:
    choose = random.Random(seed)
    schema = schema_of(choose)
    grammar, ids = of_schema(grammars, schema), list[int]()
    token_bytes = grammars.vocabulary.token_bytes
    max_tokens = max(60, 3 * (grammar.shortest_len or 0))
    state = grammar.follow((), max_tokens)
    while not state.has_ended:
        options = allowed(grammar, state.masks((), 0, (), 0)[0])
        for token_id in options:
            assert state.num_valid([token_id]) == 1, (schema, b"".join(token_bytes[i] for i in ids), token_bytes[token_id])
        for token_id in range(257):  # what the masks leave out can be spelled by other tokens
            assert (token_id in options) == (state.num_valid([token_id]) == 1), (schema, ids, token_id)
        liked = [i for i in options if len(token_bytes[i]) > 1] or options
        chosen = choose.choice(liked if choose.random() < 0.8 else options)
        ids += state.end_in_time((), 0, [chosen], max_tokens - len(ids))
        state.advance(ids[-1:])
    text = b"".join(token_bytes[i] for i in ids).decode(errors="replace")
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("pattern", "counts"), [(".{1,100}", True), (r"^[\s\S]{2}$", True), ("^[a-z]{1,9}$", False), (".*", False)]
)
def test_a_pattern_of_so_many_characters_is_a_length(grammars: Grammars, pattern: str, counts: bool) -> None:
    grammar = of_schema(grammars, {"type": "string", "pattern": pattern})
    assert grammar.counts_chars == counts
    assert takes(grammar, '"ab"')
    assert takes(grammar, r'"a\u00e9"') == (pattern != "^[a-z]{1,9}$")
    assert takes(grammar, r'"a\n"') == takes(grammar, '"\u2028a"') == ("S" in pattern)
    assert takes(grammar, '""') == (pattern == ".*")
    assert not takes(grammar, f'"{"a" * 101}"') or pattern == ".*"


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_drafts_are_masked_as_single_tokens_are(grammars: Grammars, seed: int) -> None:
    grammar = of_schema(grammars, {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 9}})
    choose, state, ids = random.Random(seed), grammar.follow(()), list[int]()
    rows = list[list[int]]()
    for _ in range(40):
        rows.append(allowed(grammar, state.masks((), 0, (), 0)[0]))
        ids.append(choose.choice([one for one in rows[-1] if one != EOS] or [EOS]))
        state.advance(ids[-1:])
    follower = grammar.follow(())
    for at in range(0, 32, 4):
        masks = follower.masks(ids[at : at + 7], 2, (), 0)
        assert [allowed(grammar, mask) for mask in masks] == rows[at + 2 : at + 8]
        follower.advance(ids[at : at + 4])


@pytest.mark.parametrize(
    ("bounds", "fitting", "wrong"),
    [
        (
            {"maxLength": 3},
            [r"\n\"\\", "\\u00e9\\u0041b", r"\ud83d\ude00ab", "😀é\x7f", "", r"\/\b\f"],
            [r"\n\n\n\n", "abcd"],
        ),
        ({"minLength": 2}, [r"\r\t", r"\ud83d\ude00\ud83d\ude00", "x" * 900], [r"\ud83d\ude00", "é", r"\n", ""]),
        ({"minLength": 65, "maxLength": 65}, ["a" * 65, r"\n" * 65], ["a" * 64, "a" * 66, r"\n" * 64 + "aa"]),
        ({"maxLength": 200}, ["a" * 200, "\\u00e9" * 200], ["a" * 201]),
        ({"minLength": 3, "maxLength": 4000}, ["a" * 4000, "\\\\" * 129], ["aa", "a" * 4001]),
        ({"minLength": 4000}, ["a" * 4000], ["a" * 3999]),
        ({"maxLength": 0}, [""], ["a", r"\n"]),
        ({"maxLength": 20}, [], ["\n", "\x01", "\\", r"\x", r"\ud83d", r"\ude00", "\\ud83da", r"\u00g0", '"']),
        (
            {"pattern": r"^\S+$"},
            [r"\"\\", "a/é", r"\u00e9", "\U0010ffff\U0010fffe"],
            [r"\n", "a b", "\xa0", "\\u00a0", "\u3000", r"\t"],
        ),
        ({"pattern": ".*"}, [r"\"a\\ \t", "", r"\u000b\u001F"], [r"\n", "\\u000a", "\n", "\u2028", "\t"]),
        ({"pattern": r'^"\n[^a]\\$'}, [r"\"\n\u0001\\", r"\"\n\"\\", r"\"\nb\\"], [r"\"\na\\", r"\"\nb", r"\"\n\n"]),
        ({"pattern": r"^[\s\S]{2}$"}, [r"\n\"", r"\r\u0000", "é\\\\"], [r"\n", "abc"]),
        ({"pattern": r"^[^\w\s]\D\W$"}, ["..\\\\", "-é?"], ["..a", ".1.", "é..", "..é"]),
        ({"pattern": r"^(?:\x22|[A-Z\u00e0-ÿ]{2,3})?$"}, [r"\"", "ABà", ""], ["A", "aa"]),
    ],
)
def test_an_escape_is_one_character(
    grammars: Grammars, bounds: dict[str, Any], fitting: list[str], wrong: list[str]
) -> None:
    schema = {"type": "string", **bounds}
    grammar = schema_grammar(schema)
    assert refusal(grammars, grammar) is None
    found = grammars.compile(grammar)
    for text in fitting:
        jsonschema.validate(json.loads(f'"{text}"'), schema)
        assert takes(found, f'"{text}"'), text
    for text in wrong:
        assert not takes(found, f'"{text}"'), text


@pytest.mark.parametrize("pattern", ['^"[a-z ]+"$', r"^C:\\[a-z]+\\[a-z]+$", r"^[a-z]+\n[a-z]+$", r'^["\\]{3}x$', r"^a\\$"])
def test_an_end_is_found_through_escapes(grammars: Grammars, pattern: str) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}, "minItems": 1}
    grammar = of_schema(grammars, schema)
    jsonschema.validate(json.loads(grammar.shortest), schema)
    tag = tag_of({"type": "json_schema", "json_schema": schema})
    jsonschema.validate(json.loads(grammars.compile(tag).shortest), schema)


@pytest.mark.parametrize("pattern", [r"\bword\b", r"(a)\1", r"\p{L}", r"\cA", "[b-a]", "[]", r"^[\ud800]$", "[a"])
def test_patterns_that_cannot_be_spelled_are_refused(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(InvalidField):
        of_schema(grammars, {"type": "string", "pattern": pattern})


def test_a_pattern_keeps_what_stands_between_its_characters() -> None:
    assert json_spelling("^(?:a|[bc]{1,2})*?d+$") == "(?:[a]|[b-c]{1,2})*?[d]+"


def test_a_pattern_of_plain_text_leaves_characters_out() -> None:
    assert plain_spelling("^(?:[a-d]|e)+$", "b") == r"(?:[ac-d]|[e])+"
    with pytest.raises(ValueError, match="'<' is not possible"):
        plain_spelling("<a>", "<")


def test_a_string_beside_other_types_keeps_its_bound(grammars: Grammars) -> None:
    either = {"type": ["string", "array"], "maxLength": 2, "items": {"type": "integer"}}
    names = {"e": either, "i": {"$ref": "#/properties/e/items"}}
    grammar = of_schema(grammars, {"type": "object", "properties": names, "required": ["e", "i"]})
    assert takes(grammar, '{"e": "ab", "i": 3}')
    assert takes(grammar, '{"e": [1, 2], "i": 3}')
    assert not takes(grammar, '{"e": "abc", "i": 3}')
    assert not takes(grammar, '{"e": ["a"], "i": 3}')
    assert not takes(grammar, '{"e": "ab", "i": "3"}')


def test_an_end_is_found_where_only_a_longer_object_has_a_token(grammars: Grammars) -> None:
    """Tokens spell an empty value with a comma behind it, and none with a brace."""
    names = {"properties": {"b": {"enum": ["a", 12]}}, "required": ["b"]}
    schema = {"type": "object", **names, "additionalProperties": {"type": "string", "maxLength": 0}}
    state = of_schema(grammars, schema).follow(grammars.vocabulary.tokens_of(b'{"b": 12, "name'))
    assert state.shortest_end() == b'": ""}'


@pytest.mark.parametrize("bounds", [{"minLength": 5, "maxLength": 3}])
def test_bounds_that_no_string_fits_are_refused(grammars: Grammars, bounds: dict[str, int]) -> None:
    with pytest.raises(InvalidField, match="minLength 5 is more than maxLength 3"):
        of_schema(grammars, {"type": "string", **bounds})


def tag_of(*elements: dict[str, Any]) -> Grammar:
    return tag_grammar({"type": "sequence", "elements": list(elements)})


def test_bounds_hold_in_tags_between_free_text(grammars: Grammars) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    call = {"type": "tag", "begin": "<c>", "content": content, "end": "</c>"}
    calls = {"type": "triggered_tags", "triggers": ["<c>"], "tags": [call]}
    found = grammars.compile(tag_of(calls))
    assert takes(found, 'any "text <c>"a\\nb"</c> more" <c>"é"</c>')
    assert not takes(found, 'any <c>"abcd"</c>')
    for text, token in (("some text", 'a"}'), ('<c>"', '""'), ('<c>"', "abc"), ('x<c>"ab', 'a"')):
        state = found.follow(found.vocabulary.tokens_of(text.encode()))
        (token_id,) = found.vocabulary.tokens_of(token.encode())
        assert (token_id in allowed(found, state.masks((), 0, (), 0)[0])) == (state.num_valid([token_id]) == 1), text


@pytest.mark.parametrize("how", [{"style": "qwen_xml"}, {"excludes": ["b"]}, {"any_order": True}])
def test_bounds_beside_what_would_drop_them_are_refused(grammars: Grammars, how: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    with pytest.raises(InvalidField, match=r"have the style json|is not supported: what"):
        grammars.compile(tag_of({"type": "json_schema", "json_schema": schema, **how}))


def test_no_grammar_beside_counted_strings_may_imitate_them(grammars: Grammars) -> None:
    bounded = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    other = {"type": "regex", "pattern": "[^\U0010fffe]*"}
    grammars.compile(tag_of(other))
    with pytest.raises(InvalidField, match="not possible beside strings with bounds"):
        grammars.compile(tag_of(other, bounded))


VALID = {
    "date": ("2024-02-29", "2000-02-29", "0476-09-04", "2023-12-31"),
    "time": ("23:59:59Z", "08:00:00.123456+05:30"),
    "date-time": ("2024-02-29T23:59:59.5-08:00",),
    "email": ("ada.lovelace+a@mail.example.org", f"{'a' * 64}@b.de"),
    "hostname": ("localhost", "a-b.example.org", "a.b.c.d.e.f.example.org", f"{'a' * 63}.de"),
    "ipv4": ("0.0.0.0", "255.249.199.99"),
    "ipv6": ("::", "::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7::", "1:2:3:4:5:6:7:8"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
}
INVALID = {
    "date": ("2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01"),
    "time": ("24:00:00Z", "08:00:60Z", "08:00:00"),
    "date-time": ("2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"),
    "email": ("a..b@c.de", "a@b@c", f"{'a' * 65}@b.de"),
    "hostname": ("-a.de", "a-.de", f"{'a' * 64}.de", ".".join(["a" * 63] * 4)),
    "ipv4": ("000.000.000.0", "01.2.3.4", "256.1.1.1"),
    "ipv6": ("00000::", "1::2::3", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:8::"),
    "uuid": ("123e4567-e89b-12d3-a456-42661417400",),
}


def compiled(grammars: Grammars, kind: str) -> CompiledGrammar:
    return of_schema(grammars, {"type": ["string", "null"], "format": kind})


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_takes_exactly_valid_texts(grammars: Grammars, kind: str) -> None:
    for texts, is_valid in ((VALID[kind], True), (INVALID[kind], False)):
        for text in texts:
            assert takes(compiled(grammars, kind), json.dumps(text)) is is_valid, text


def check(kind: str, value: str) -> None:
    if kind in ("time", "date-time"):
        datetime.fromisoformat(value if kind == "date-time" else f"2000-01-01T{value}")
    else:
        jsonschema.FormatChecker().check(value, kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_random_texts_of_a_format_are_valid(grammars: Grammars, kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(30):
        text = walk(compiled(grammars, kind), rng, 150)
        value = None if text is None else json.loads(text)
        if value is None:
            continue
        assert LENGTHS[kind][0] <= len(value) <= LENGTHS[kind][1]
        check(kind, value)


LONGEST = {
    "date": "2024-02-29",
    "time": "23:59:59.123456789+05:30",
    "date-time": "2024-02-29T23:59:59.123456789+05:30",
    "email": f"{'a' * 64}@{'.'.join(['a' * 24] * 7)}",
    "hostname": ".".join(["a" * 24] * 10),
    "ipv4": "255.249.199.199",
    "ipv6": ":".join(["2001"] * 8),
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
}


@pytest.mark.parametrize("kind", FORMATS)
def test_bounds_that_a_format_keeps_anyway_are_taken(grammars: Grammars, kind: str) -> None:
    shortest, longest = LENGTHS[kind]
    assert len(LONGEST[kind]) == longest
    schema = {"type": "string", "format": kind, "minLength": shortest, "maxLength": longest}
    assert takes(of_schema(grammars, schema), json.dumps(LONGEST[kind]))


NARROWER = {
    "time": (10, 15),
    "date-time": (20, 25),
    "email": (12, 40),
    "hostname": (9, 30),
    "ipv4": (9, 12),
    "ipv6": (4, 20),
}


@pytest.mark.parametrize(("kind", "bounds"), NARROWER.items())
def test_narrower_bounds_give_shorter_and_longer_texts(grammars: Grammars, kind: str, bounds: tuple[int, int]) -> None:
    rng = random.Random(kind)
    schema = {"type": "string", "format": kind, "minLength": bounds[0], "maxLength": bounds[1]}
    found = of_schema(grammars, schema)
    texts = [text for _ in range(30) if (text := walk(found, rng, 150)) is not None]
    assert texts
    for value in map(json.loads, texts):
        assert bounds[0] <= len(value) <= bounds[1]
        check(kind, value)


@pytest.mark.parametrize(
    ("kind", "bound"), [("date", {"maxLength": 9}), ("uuid", {"minLength": 37}), ("ipv4", {"minLength": 16})]
)
def test_a_length_that_no_text_of_a_format_has_is_refused(grammars: Grammars, kind: str, bound: dict[str, int]) -> None:
    with pytest.raises(InvalidField, match="of the demanded length is known"):
        of_schema(grammars, {"type": "string", "format": kind} | bound)
