"""The schema of what matches two schemas at once."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.grammar.schema_spellings import types_of

_MAX_CASES = 256  # of alternatives that are multiplied
_LEAST = frozenset({"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"})
_MOST = frozenset({"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"})


class NotMergeable(Exception):
    """Says which keyword stands in the way."""


def merged(a: Any, b: Any) -> Any:
    """Of two schemas in normal form (`schema_forms`), none of which refers to another one. False: nothing matches both.

    Raises:
        NotMergeable: a keyword of both cannot be merged.
    """
    if isinstance(a, bool) or isinstance(b, bool):
        return b if a is True else a if b is True else False
    if not a or not b or a == b:
        return a or b
    for one, other in ((a, b), (b, a)):
        for kind in ("anyOf", "oneOf"):
            if kind in one:
                return _distributed(one, kind, other)
    for one, other in ((a, b), (b, a)):
        if "const" in one or "enum" in one:
            return _filtered(one, other)
    return _of_keywords(a, b)


def _distributed(one: dict[str, Any], kind: str, other: dict[str, Any]) -> Any:
    """``one`` has alternatives and nothing else but how they are told apart."""
    cases = [case for case in (merged(case, other) for case in one[kind]) if case is not False]
    if len(cases) > _MAX_CASES:
        raise NotMergeable(f"there are more than {_MAX_CASES} alternatives")
    return {**one, kind: cases} if cases else False


def _filtered(one: dict[str, Any], other: dict[str, Any]) -> Any:
    values = [one["const"]] if "const" in one else one["enum"]
    if other.keys() - {"const", "enum", "type"}:
        raise NotMergeable(sorted(other.keys() - {"const", "enum", "type"})[0])
    types = {"type": types_of(other)} if "type" in other else {}
    allowed = [other["const"]] if "const" in other else other.get("enum")
    if not isinstance(values, list) or not isinstance(allowed, list | None):
        raise NotMergeable("enum")
    equal = None if allowed is None else set(map(spelled, allowed))
    kept = [
        value
        for value in values
        if (equal is None or spelled(value) in equal) and (not types or any(is_of(value, name) for name in types["type"]))
    ]
    return {**{key: one[key] for key in one if key not in ("const", "enum")}, "enum": kept} if kept else False


def _of_keywords(a: dict[str, Any], b: dict[str, Any]) -> Any:
    found: dict[str, Any] = {}
    for key in (*a, *(key for key in b if key not in a)):
        if key in ("properties", "additionalProperties"):
            continue
        if key not in a or key not in b or a[key] == b[key]:
            found[key] = a.get(key, b.get(key))
        elif key == "type":
            found[key] = _common_types(a, b)
            if not found[key]:
                return False
        elif key == "required":
            found[key] = list(dict.fromkeys((*a[key], *b[key])))
        elif key in _LEAST | _MOST and _are_numbers(a[key], b[key]):
            found[key] = (max if key in _LEAST else min)(a[key], b[key])
        elif key == "items" and not {"prefixItems"} & (a.keys() | b.keys()):
            found[key] = merged(a[key], b[key])
        else:
            raise NotMergeable(key)
    if (
        "prefixItems" in found
        and found.get("items", True) is not True
        and not ({"items", "prefixItems"} <= a.keys() or {"items", "prefixItems"} <= b.keys())
    ):
        raise NotMergeable("prefixItems")
    return _with_properties(a, b, found)


def _with_properties(a: dict[str, Any], b: dict[str, Any], found: dict[str, Any]) -> Any:
    """``found`` with the properties of both. A property of one alone is, to the other, an additional one."""
    if not (a.keys() | b.keys()) & {"properties", "additionalProperties"}:
        return found
    if "additionalProperties" in a or "additionalProperties" in b:
        found["additionalProperties"] = merged(a.get("additionalProperties", True), b.get("additionalProperties", True))
    properties = {}
    for name in _names(a, b):
        both = merged(_at(a, name), _at(b, name))
        if both is not False:
            properties[name] = both
        elif name in found.get("required", ()):
            return False
        elif found.get("additionalProperties", False) is not False:
            raise NotMergeable(f"the property {name[:60]!r}")
    if properties or "properties" in a or "properties" in b:
        found["properties"] = properties
    return found


def _names(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    yield from a.get("properties", {})
    yield from (name for name in b.get("properties", {}) if name not in a.get("properties", {}))


def _at(schema: Mapping[str, Any], name: str) -> Any:
    properties: dict[str, Any] = schema.get("properties", {})
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def _common_types(a: dict[str, Any], b: dict[str, Any]) -> Any:
    mine, others = types_of(a), types_of(b)
    common = [one for one in mine if one in others or (one == "integer" and "number" in others)]
    common += [one for one in others if one == "integer" and "number" in mine and one not in common]
    return common if len(common) != 1 else common[0]


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def spelled(value: Any) -> str:
    """A text that equal JSON values share: 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_of(value: Any, type_name: str) -> bool:
    """Whether a JSON value is of a type of JSON Schema."""
    match type_name:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            )
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)
