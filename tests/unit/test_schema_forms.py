"""Schemas as pydantic, zod, TypeBox, TypeScript's generators and OpenAPI write them."""

import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, Field, constr

from engine.grammar.compiling import Grammars
from engine.grammar.schema_forms import normal_form
from tests.support import grammars as support

INTEGER = {"type": "integer"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": INTEGER}, "required": ["kind", "n"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog"], "default": "dog"}}}


def takes(grammars: Grammars, schema: Any, text: str) -> bool:
    return support.takes(support.of_schema(grammars, schema), text)


SAME: list[tuple[Any, Any]] = [
    # Demands that demand nothing.
    ({"type": "object", "propertyNames": {"type": "string", "title": "Name"}}, {"type": "object"}),
    ({"type": "object", "propertyNames": True, "patternProperties": {}}, {"type": "object"}),
    ({"type": "object", "minProperties": 0, "dependentRequired": {}, "dependencies": {}}, {"type": "object"}),
    ({"type": "object", "required": [], "unevaluatedProperties": {}}, {"type": "object"}),
    ({"type": "array", "items": INTEGER, "uniqueItems": False, "minItems": 0}, {"type": "array", "items": INTEGER}),
    ({"type": "array", "items": INTEGER, "contains": True, "minContains": 0}, {"type": "array", "items": INTEGER}),
    ({"type": "array", "items": INTEGER, "unevaluatedItems": True}, {"type": "array", "items": INTEGER}),
    ({"type": "integer", "multipleOf": 1, "nullable": False}, INTEGER),
    ({"type": "number", "multipleOf": 1.0}, INTEGER),
    ({"type": "integer", "multipleOf": 0.5}, INTEGER),
    ({"type": "integer", "exclusiveMinimum": False, "minimum": 2}, {"type": "integer", "minimum": 2}),
    ({"type": "string", "minLength": 0, "pattern": ""}, {"type": "string"}),
    ({"type": "string", "not": False, "then": {"minLength": 3}}, {"type": "string"}),
    # Annotations, and keywords of other types.
    ({"type": "string", "contentEncoding": "base64", "contentMediaType": "text/plain", "x-order": 1}, {"type": "string"}),
    ({"type": "string", "example": "a", "xml": {"name": "a"}, "externalDocs": {}}, {"type": "string"}),
    ({"type": "integer", "format": "int64"}, INTEGER),
    ({"type": "string", "minimum": 3, "items": {"not": INTEGER}}, {"type": "string"}),
    # Older drafts and OpenAPI.
    (
        {"type": "array", "items": [INTEGER], "additionalItems": False},
        {"type": "array", "prefixItems": [INTEGER], "items": False},
    ),
    ({"type": "integer", "minimum": 2, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 2}),
    ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    (
        {"type": "string", "enum": ["a", None], "nullable": True},
        {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]},
    ),
    ({"type": "string", "enum": ["a"], "nullable": True}, {"type": "string", "enum": ["a"]}),
    ({"const": "a", "enum": ["a", "b"]}, {"const": "a"}),
    # Names of properties.
    (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": INTEGER, "required": ["a"]},
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False, "required": ["a"]},
    ),
    ({"type": "object", "patternProperties": {"^(.*)$": INTEGER}}, {"type": "object", "additionalProperties": INTEGER}),
    (
        {"type": "object", "patternProperties": {"^[a-z]$": INTEGER}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}, "additionalProperties": INTEGER},
    ),
    (
        {"type": "object", "required": ["a"], "additionalProperties": INTEGER},
        {"type": "object", "required": ["a"], "additionalProperties": INTEGER, "properties": {"a": INTEGER}},
    ),
    (
        {"type": "object", "patternProperties": {"^.*$": INTEGER}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"pattern": "^.*$"}, "additionalProperties": INTEGER},
    ),
    # What several schemas demand at once.
    (
        {"allOf": [{"type": "object", "properties": {"a": INTEGER}}, {"properties": {"b": {}}, "required": ["b"]}]},
        {"type": "object", "properties": {"a": INTEGER, "b": {}}, "required": ["b"]},
    ),
    (
        {"type": "integer", "minimum": 1, "allOf": [{"minimum": 3}, {"maximum": 5}]},
        {"type": "integer", "minimum": 3, "maximum": 5},
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [{"type": "object", "properties": {"a": {}, "b": {}}, "required": [one]} for one in ("a", "b")]},
    ),
    (
        {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": {}}}], "unevaluatedProperties": False},
        {"properties": {"a": INTEGER, "b": {}}, "additionalProperties": False},
    ),
    (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "additionalProperties": False},
    ),
    ({"anyOf": [{"type": "string"}, {"type": "null"}, {"not": {}}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    (
        {"type": ["string", "null"], "enum": ["a", 1, None], "anyOf": [{"const": "a"}, {"const": 1}]},
        {"anyOf": [{"enum": ["a"]}]},
    ),
]


@pytest.mark.parametrize(("schema", "same"), SAME)
def test_a_schema_is_rewritten(schema: Any, same: Any) -> None:
    assert normal_form(schema) == same


REFERENCES: list[tuple[str, dict[str, Any]]] = [
    ("#/$defs/A", {"$defs": {"A": INTEGER}}),
    ("#/definitions/A", {"definitions": {"A": INTEGER}}),
    ("#/%24defs/A", {"$defs": {"A": INTEGER}}),
    ("#/definitions/Pick%3CA%2C%22b%22%3E", {"definitions": {'Pick<A,"b">': INTEGER}}),
    ("#/components/schemas/A~1B", {"components": {"schemas": {"A/B": INTEGER}}}),
    ("#a", {"$defs": {"A": {"$anchor": "a", **INTEGER}}}),
    ("#a", {"definitions": {"A": {"$id": "#a", **INTEGER}}}),
    ("A", {"$defs": {"A": {"$id": "A", **INTEGER}}}),
    ("https://x.org/s.json#/$defs/A", {"$id": "https://x.org/s.json", "$defs": {"A": INTEGER}}),
    ("s.json#/$defs/A", {"$id": "https://x.org/s.json", "$defs": {"A": INTEGER}}),
    ("#/$defs/A/items/0", {"$defs": {"A": {"items": [INTEGER]}}}),
    ("#/$defs/B/$defs/A", {"$defs": {"B": {"$defs": {"A": INTEGER}}, "unused": {"not": {"type": "null"}}}}),
]


@pytest.mark.parametrize(("reference", "beside"), REFERENCES)
def test_a_reference_is_followed_in_each_spelling(grammars: Grammars, reference: str, beside: dict[str, Any]) -> None:
    described = {"$ref": reference, "description": "an integer", "default": 1}
    schema = {"type": "object", "properties": {"a": described, "b": {"allOf": [described], "title": "b"}}, **beside}
    assert takes(grammars, schema, '{"a": 1, "b": 2}')
    assert not takes(grammars, schema, '{"a": "1"}')


@pytest.mark.parametrize("reference", ["#/$defs/B", "#b", "B", "#/$defs/A/0", "http://other.org/s"])
def test_a_reference_to_nothing_is_refused(grammars: Grammars, reference: str) -> None:
    with pytest.raises(ValueError, match=r"#/properties/a/\$ref: "):
        takes(grammars, {"properties": {"a": {"$ref": reference}}, "$defs": {"A": INTEGER}}, "{}")


RECURSIVE = [
    {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
    {"$id": "Node", "type": "object", "properties": {"next": {"$ref": "Node"}}},
    {"type": "object", "properties": {"next": {"allOf": [{"$ref": "#"}]}}},
    {
        "definitions": {"N": {"properties": {"next": {"$ref": "#/definitions/N"}}}},
        "$ref": "#/definitions/N",
        "type": "object",
    },
]


@pytest.mark.parametrize("schema", RECURSIVE)
def test_a_recursive_schema_stays_recursive(grammars: Grammars, schema: Any) -> None:
    assert takes(grammars, schema, '{"next": {"next": {"next": {}}}}')
    assert not takes(grammars, schema, '{"next": {"next": 1}}')


def test_a_schema_that_grows_without_bound_when_merged_is_refused_quickly() -> None:
    links = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 4} for i in range(20)}
    with pytest.raises(ValueError, match="more than 16384 schemas"):
        normal_form({"$ref": "#/$defs/A0", "$defs": {**links, "A20": INTEGER}})


@pytest.mark.parametrize("told_by", [{"discriminator": {"propertyName": "kind"}}, {}])
def test_one_of_several_objects_is_told_by_a_constant(grammars: Grammars, told_by: dict[str, Any]) -> None:
    schema = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], **told_by, "$defs": {"Cat": CAT, "Dog": DOG}}
    assert takes(grammars, schema, '{"kind": "cat", "n": 1}')
    assert takes(grammars, schema, '{"kind": "dog"}')
    assert takes(grammars, schema, "{}") == (not told_by)
    assert not takes(grammars, schema, '{"kind": "dog", "n": 1}')


class Leaf(BaseModel):
    kind: str = Field("leaf", json_schema_extra={"const": "leaf"})
    value: int = Field(multiple_of=1)


class Branch(BaseModel):
    kind: str = Field("branch", json_schema_extra={"const": "branch"})
    children: "list[Leaf | Branch]" = Field(max_length=2)


class Order(BaseModel):
    """What a customer orders."""

    labels: dict[constr(pattern="^[a-z]+$"), int]  # type: ignore[valid-type]
    sizes: dict[str, int] = Field(min_length=1, max_length=2)
    place: tuple[int, str] | None = Field(None, description="row and shelf", json_schema_extra={"x-order": 1})
    tree: Leaf | Branch


def test_a_model_of_pydantic_is_enforced(grammars: Grammars) -> None:
    schema = Order.model_json_schema()
    tree = '{"kind": "branch", "children": [{"kind": "leaf", "value": 1}, {"kind": "branch", "children": []}]}'
    text = f'{{"labels": {{"ab": 1}}, "sizes": {{"a": 1, "b": 2}}, "place": [1, "a"], "tree": {tree}}}'
    jsonschema.validate(json.loads(text), schema)
    assert takes(grammars, schema, text)
    for part, wrong in (
        ('"ab"', '"AB"'),
        ('"b": 2}', '"b": 2, "c": 3}'),
        ('[1, "a"]', '["a"]'),
        ('"value": 1', '"value": 1.5'),
    ):
        assert part in text
        assert not takes(grammars, schema, text.replace(part, wrong)), wrong
