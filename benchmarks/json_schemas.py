"""Seeded JSON schemas of the kinds that callers write: nested and recursive objects, enums, constants, patterns, formats,
unions and bounds."""

import random
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field

Schema = dict[str, Any]

_NAMES = (
    *("name", "title", "city", "country", "colour", "status", "summary", "comment", "street", "label", "author", "unit"),
    *("age", "count", "price", "score", "id", "year", "quantity", "rating", "active", "tags", "items", "address"),
)
_WORDS = (
    "red",
    "green",
    "blue",
    "open",
    "closed",
    "low",
    "medium",
    "high",
    "north",
    "south",
    "yes",
    "no",
    "a b",
    'the "best"',
)
_PATTERNS = (
    r"^[A-Z]{2}-[0-9]{3}$",
    r"^[a-z]+@[a-z]+\.(com|org)$",
    r"^\d{4}-\d{2}$",
    r"^(cat|dog|bird)s?$",
    r"^#[0-9a-f]{6}$",
    r"^[A-Z][a-z]+( [A-Z][a-z]+)?$",
)
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "uri")
MAX_DEPTH = 3
LENGTHS = (1, 2, 20, 64, 127, 129, 200, 300, 1000, 4000)

Short = Annotated[str, Field(min_length=1, max_length=200)]


class Author(BaseModel):
    name: Short
    biography: str | None = Field(default=None, max_length=2000)


class Article(BaseModel):
    title: str = Field(max_length=200)
    slug: str = Field(pattern="^[a-z0-9-]{1,80}$")
    summary: str = Field(min_length=20, max_length=300)
    authors: list[Author] = Field(min_length=1, max_length=50)
    tags: list[Short] = Field(max_length=200)
    labels: dict[str, Annotated[str, Field(max_length=100)]]


def bounded_schemas() -> list[Schema]:
    """Strings and lists with bounds from 1 to 4,000, alone and as pydantic writes them."""
    string, words = {"type": "string"}, {"type": "array", "items": {"type": "string", "maxLength": 200}}
    alone = [
        schema | bounds
        for num in LENGTHS
        for schema, bounds in (
            (string, {"maxLength": num}),
            (string, {"minLength": num}),
            (string, {"minLength": num, "maxLength": num}),
            (string, {"minLength": num // 2, "maxLength": num}),
            (words, {"maxItems": num}),
        )
    ]
    several = {f"f{num}": string | {"maxLength": num} for num in LENGTHS}
    return [*alone, {"type": "object", "properties": several}, Author.model_json_schema(), Article.model_json_schema()]


def escaping_schemas() -> list[Schema]:
    """Strings that JSON spells with escapes, each beside one with a bound."""
    note = {"type": "string", "minLength": 1, "maxLength": 12}
    patterns = (
        '^"[a-z ]+"$',
        r"^C:\\[a-z]+\\[a-z]+$",
        "^[a-z]+\\n[a-z]+$",
        r"^\S+$",
        r'^["\\\t\u0001]{2,6}$',
        "^[^a-z]{1,9}$",
    )
    texts = [{"type": "string", "pattern": pattern} for pattern in patterns]
    return [{"type": "object", "properties": {"text": text, "note": note}, "required": ["text", "note"]} for text in texts]


def make_schemas(num: int, seed: int = 0) -> list[Schema]:
    """The first ``num`` schemas of a seed. Every tenth is recursive."""
    rng = random.Random(seed)
    return [_recursive(rng) if i % 10 == 9 else _object(rng, 0) if i % 5 else _any(rng, 0) for i in range(num)]


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: tuple[Callable[[random.Random], Schema], ...] = (_string, _number, _choice, _pattern, _leaf)
    if depth >= MAX_DEPTH or rng.random() < 0.55:
        return rng.choice(leaves)(rng)
    return rng.choice((_object, _array, _union))(rng, depth + 1)


def _string(rng: random.Random) -> Schema:
    bounds = rng.choice(
        ({}, {"maxLength": 20}, {"minLength": 3, "maxLength": 12}, {"minLength": 2}, {"maxLength": 200}, {"maxLength": 4000})
    )
    return {"type": "string", **bounds}


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-20, 200)
    bounds = rng.choice(({}, {"minimum": low}, {"minimum": low, "maximum": low + rng.randint(1, 500)}, {"maximum": low}))
    exclusive = {"exclusiveMinimum": 0, "exclusiveMaximum": 100}
    return {"type": rng.choice(("integer", "number")), **(exclusive if rng.random() < 0.15 else bounds)}


def _choice(rng: random.Random) -> Schema:
    words = rng.sample(_WORDS, rng.randint(2, 5))
    return rng.choice(({"enum": words}, {"enum": [*words, None, 3]}, {"const": words[0]}, {"type": "string", "enum": words}))


def _pattern(rng: random.Random) -> Schema:
    if rng.random() < 0.5:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _leaf(rng: random.Random) -> Schema:
    return rng.choice(
        ({"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "boolean"]})
    )


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 5 if depth == 0 else 3))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth + 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    extra = rng.random()
    if extra < 0.4:
        schema["additionalProperties"] = False
    elif extra < 0.5:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_any(rng, depth + 1) for _ in range(2)], "items": False, "minItems": 2}
    bounds = rng.choice(({}, {"maxItems": 3}, {"minItems": 1, "maxItems": 4}, {"minItems": 2}))
    return {"type": "array", "items": _any(rng, depth + 1), **bounds}


def _union(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"oneOf": [_string(rng), _object(rng, depth + 1), {"type": "null"}]}
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _recursive(rng: random.Random) -> Schema:
    kind = rng.randrange(4)
    node: Schema = {"type": "object", "properties": {"value": _any(rng, MAX_DEPTH)}, "required": ["value"]}
    if kind == 0:
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}}
        node["required"].append("children")
    elif kind == 1:
        node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        node["required"].append("next")
    elif kind == 2:
        node["properties"]["child"] = {"$ref": "#/$defs/node"}
        node["additionalProperties"] = False
    else:
        node = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3}]}
    return {
        "$defs": {"node": node},
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
    }
