"""Seeded JSON schemas of the kinds that callers write: nested and recursive objects, enums, constants, patterns, formats,
unions and bounds."""

import random
from collections.abc import Callable
from typing import Any

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
    bounds = rng.choice(({}, {"maxLength": 20}, {"minLength": 3, "maxLength": 12}, {"minLength": 2}))
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
