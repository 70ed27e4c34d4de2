"""Which JSON schemas and patterns are refused."""

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidField
from engine.grammar.json_pattern import json_spelling, repeated, repeats_fault, with_plain_codes
from engine.grammar.schema_rules import checked, pattern_fault
from engine.grammar.schema_spellings import KEYWORDS

REFUSED: list[tuple[Any, str]] = [
    ({"allOf": [{"enum": [True]}, {"enum": [1]}]}, "allows nothing"),
    ({"allOf": [{"const": 1}, {"const": True}]}, "allows nothing"),
    (False, "allows nothing"),
    ([1], "must be an object"),
    ({"items": [None]}, "#/prefixItems/0: must be an object"),
    ({"type": "int"}, "#/type: must be of string"),
    ({"not": {"type": "string"}}, "must give its type beside not"),
    ({"type": "string", "not": {"const": "a"}}, "#/not: is not supported for the type string"),
    ({"type": "string", "not": {}}, "allows nothing"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems: is not supported"),
    ({"type": "integer", "multipleOf": 3}, "#/multipleOf: is not supported"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "#/patternProperties: is not supported"),
    ({"properties": {"a": {}}, "propertyNames": {"minLength": 2}}, "#/propertyNames: is not supported beside properties"),
    ({"propertyNames": {"type": "integer"}}, "#/propertyNames: must describe strings"),
    ({"type": "object", "minProperties": 2}, "#/minProperties: is not supported beyond 1"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "allows nothing"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "cannot be merged: pattern"),
    ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "lies deeper than 64 levels"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf: must have schemas of which each value matches one"),
    ({"oneOf": [{"const": 1}, {"type": "integer"}]}, "#/oneOf: must have schemas of which each value matches one"),
    ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}, "each value matches one"),
    ({"const": 2**63}, "#/const: has an integer of more than 64 bits"),
    ({"enum": [{"a": [2**64]}]}, "#/enum: has an integer of more than 64 bits"),
    ({"type": "string", "max_length": 2}, "#/max_length: is not known; write maxLength"),
    ({"additionalproperties": False}, "#/additionalproperties: is not known; write additionalProperties"),
    ({"$dynamicRef": "#a"}, "must give its type beside $dynamicRef"),
    ({"anyOf": []}, "#/anyOf: must be a list of schemas"),
    ({"anyOf": [{"not": {}}]}, "allows nothing"),
    ({"$ref": "http://elsewhere/schema"}, "references to other documents"),
    ({"$ref": "#/$defs/a"}, "is not in the schema"),
    ({"enum": []}, "#/enum: must be a list of values"),
    ({"type": "string", "enum": [1]}, "#/enum: has values of another type"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "allows nothing"),
    ({"type": "string", "minLength": -1}, "#/minLength: must be an integer from 0"),
    ({"type": "string", "maxLength": 10**9}, "#/maxLength: must be an integer from 0"),
    (
        {"type": "string", "pattern": "a", "minLength": 2},
        "#/pattern: is supported together with minLength or maxLength as one",
    ),
    ({"type": "string", "pattern": "^(?=a)b$"}, "begins with"),
    ({"properties": {"a": {"items": {"type": "x"}}}}, "#/properties/a/items/type"),
    ({"type": 5}, "#/type: must be of string"),
    ({"type": None}, "#/type: must be of string"),
    ({"type": []}, "#/type: must be of string"),
    ({"type": {"string": 1}}, "#/type: must be of string"),
    ({"type": "string", "format": {}}, "#/format: must be a string"),
    ({"oneOf": 5}, "#/oneOf: must be a list of schemas"),
    ({"oneOf": [{"type": 5}, {"type": "string"}]}, "type: must be of string"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidField) as refused:
        checked(json.dumps(schema))
    assert reason in refused.value.reason


@pytest.mark.parametrize("source", ["{", "", '{"items":' * 3000 + "{}" + "}" * 3000])
def test_what_is_not_json_is_refused(source: str) -> None:
    with pytest.raises(InvalidField, match="is not JSON"):
        checked(source)


def test_deep_schemas_are_refused() -> None:
    with pytest.raises(InvalidField, match="deeper than 64 levels"):
        checked('{"items":' * 100 + "{}" + "}" * 100)


@pytest.mark.parametrize(
    ("schema", "compiled"),
    [
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "type": "object"}),
        ({"minLength": 2.0}, {"minLength": 2, "type": "string"}),
        ({"minItems": 1}, {"minItems": 1, "type": "array", "items": True}),
        ({"type": "string", "format": "uri"}, {"type": "string"}),
        ({"oneOf": [{"type": "null"}, {"const": "a"}]}, {"anyOf": [{"type": "null"}, {"const": "a"}]}),
        ({"type": "integer", "minimum": 18, "exclusiveMinimum": 0.5}, {"type": "integer", "minimum": 18}),
        ({"type": "integer", "maximum": 2.5, "exclusiveMaximum": 7.5}, {"type": "integer", "maximum": 2}),
        ({"type": ["integer", "null"], "minimum": 0.5}, {"type": ["integer", "null"], "minimum": 1}),
        ({"type": ["integer", "number"], "minimum": 0.5}, {"type": ["number"], "minimum": 0.5}),
        (
            {"additionalProperties": False, "propertyNames": {"pattern": "a"}},
            {"type": "object", "additionalProperties": False},
        ),
    ],
)
def test_a_schema_is_completed(schema: Any, compiled: Any) -> None:
    assert checked(json.dumps(schema))[0] == compiled


@pytest.mark.parametrize("pattern", ["a", "^a$", r"^[\^$]\$\^$", r"^(?:a|b)+\\$", "[^a]", "^$", r"\(?x"])
def test_patterns_that_can_be_enforced(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize("pattern", ["(?!a)", "(?<n>a)", "(?i)a", r"\Aa", r"a\Z", "a$b", "a^", "^a$|b"])
def test_patterns_that_cannot(pattern: str) -> None:
    assert pattern_fault(pattern) is not None


@pytest.mark.parametrize(
    ("pattern", "least", "most", "both"),
    [
        ("^[a-z]+$", 3, 64, "^[a-z]{3,64}$"),
        (r"\w{2,8}", 0, 5, r"^\w{2,5}$"),
        ("^.*$", 4, None, "^.{4,}$"),
        ("^[^/]?$", 0, 9, "^[^/]{0,1}$"),
        (r"[\]a-z]{4}", 0, 4, r"^[\]a-z]{4,4}$"),
        ("^[a-z]{5}$", 0, 4, None),  # nothing matches both
        ("^[a-z]+-[a-z]+$", 3, 64, None),
        ("^(ab)+$", 3, 64, None),
    ],
)
def test_a_repeated_character_takes_bounds(pattern: str, least: int, most: int | None, both: str | None) -> None:
    assert repeated(pattern, least, most) == both


def test_codes_get_braces_but_for_escaped_backslashes() -> None:
    assert with_plain_codes(r"\x41B\u00e9[\x30-\x39]\\x41\d") == r"\u{41}B\u{00e9}[\u{30}-\u{39}]\\x41\d"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, math.inf, 10**400, "", "a", "string", "object"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*sorted(KEYWORDS), "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(schema=st.dictionaries(st.sampled_from(sorted(KEYWORDS)), _VALUES, max_size=4))
def test_no_schema_ends_the_check(schema: dict[str, Any]) -> None:
    """Whatever its keywords hold, it passes or is refused with a place."""
    refusal = None
    try:
        checked(json.dumps(schema))
    except InvalidField as error:
        refusal = error.reason
    assert refusal is None or refusal.startswith("at #")


def test_equal_numbers_are_no_two_cases() -> None:
    with pytest.raises(InvalidField, match="matches one at most"):
        checked(json.dumps({"oneOf": [{"const": 1}, {"const": 1.0}]}))
    checked(json.dumps({"oneOf": [{"const": 1}, {"const": True}]}))


@pytest.mark.parametrize("step", [math.inf, 10**400])
def test_a_step_that_no_number_has_is_not_dropped(step: float) -> None:
    with pytest.raises(InvalidField, match="multipleOf: must be a finite number"):
        checked(json.dumps({"type": "integer", "multipleOf": step}))


def test_whatever_else_is_closed_where_all_is_allowed() -> None:
    found, _ = checked(json.dumps({"type": "object", "anyOf": [True], "unevaluatedProperties": False}))
    assert found == {"anyOf": [{"type": "object", "additionalProperties": False}]}


@pytest.mark.parametrize("part", ["[", "[^", "[]", '["', "[\\", "(", "\\"])
def test_a_pattern_is_checked_in_linear_time(part: str) -> None:
    def cost_s(num: int) -> float:
        def once() -> float:
            begin_s = time.process_time()
            pattern_fault(part * num)
            repeats_fault(part * num, is_regex=False)
            return time.process_time() - begin_s

        return min(once() for _ in range(3))

    assert cost_s(8000) < 24 * cost_s(1000), "eight times as long"


def test_a_pattern_whose_classes_are_endless_is_refused_before_it_is_spelled_out() -> None:
    with pytest.raises(ValueError, match="when its classes are spelled out"):
        json_spelling(r"\D" * 8000)
