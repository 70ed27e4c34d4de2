"""Strings with a format are valid for Python's own readers of dates and addresses, and for another project's validator."""

import json
import random
from datetime import datetime

import jsonschema
import pytest

from cluster.errors import InvalidField
from engine.grammar.compiling import CompiledGrammar, Grammars
from engine.grammar.string_formats import FORMATS, LENGTHS
from tests.support.grammars import of_schema, takes
from tests.unit.test_schema_validity import walk

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
