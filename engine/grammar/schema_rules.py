"""Which JSON schemas and patterns can be enforced. xgrammar ignores some keywords, and some beside others, and would let
invalid output pass: those are refused. A schema without a type gets the one that its keywords are about; formats without a
pattern in `string_formats` are annotations, as JSON Schema has it. `schema_forms` rewrites schemas before.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.errors import InvalidField
from engine.grammar.json_pattern import CLASS, repeated, repeats_fault
from engine.grammar.json_rules import placeholder
from engine.grammar.schema_forms import is_of, normal_form, spelled
from engine.grammar.schema_spellings import refused, types_of, values_of
from engine.grammar.string_formats import FORMATS, format_pattern

MAX_REFERENCES = 16  # of references that refer to references
MAX_REPEATS = 4096  # of minLength, minItems and the like

MAX_INTEGER = 2**63  # of the integers that xgrammar writes exactly

# What is enforced beside the keyword that decides what kind of schema it is; the first that a schema has decides.
_BESIDE: tuple[tuple[str, frozenset[str]], ...] = (
    ("$ref", frozenset()),
    ("const", frozenset({"type"})),
    ("enum", frozenset({"type"})),
    ("anyOf", frozenset()),
    ("oneOf", frozenset({"discriminator"})),
)
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
    ),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def checked(source: str) -> tuple[Any, frozenset[str]]:
    """The schema to compile, all of whose outputs match ``source``, and the names that any of its objects require.

    Raises:
        InvalidField: it is not JSON, not a schema, or one that cannot be enforced; says at which path.
    """
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidField("json_schema", source[:80], f"is not JSON: {error}") from error
    return checked_schema(schema)


def checked_schema(schema: Any) -> tuple[Any, frozenset[str]]:
    """As ``checked``, of a schema that is not text."""
    found = normal_form(schema)
    nodes = _checked_nodes(found)
    for path, one in nodes:
        _finish(path, one)
    return found, frozenset(name for _, one in nodes for name in one.get("required", ()))


def read_schema(schema: Any) -> Any:
    """In normal form, with types, all of it possible to enforce. Raises as ``checked``."""
    found = normal_form(schema, names_root=True)
    _checked_nodes(found)
    return found


def _checked_nodes(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    nodes = list(_walk(schema, "#"))
    for path, one in nodes:
        _check(path, one, schema)
    return nodes


def _walk(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas in one in normal form, each with its path."""
    if schema is True:
        return
    if schema is False:
        raise refused(path, "allows nothing")
    yield path, schema
    for key in ("properties", "$defs"):
        for name, one in schema.get(key, {}).items():
            yield from _walk(one, f"{path}/{key}/{name}")
    for key in ("anyOf", "oneOf", "prefixItems"):
        for i, one in enumerate(schema.get(key, ())):
            yield from _walk(one, f"{path}/{key}/{i}")
    for key in ("items", "additionalProperties", "propertyNames"):
        if schema.get(key, False) is not False:
            yield from _walk(schema[key], f"{path}/{key}")


def _check(path: str, schema: dict[str, Any], root: Any) -> None:
    keys = schema.keys() - {"$defs"}
    for decider, beside in _BESIDE:
        if decider in keys:
            _refuse_others(path, keys - beside - {decider}, f"beside {decider}")
            _check_decider(path, decider, schema, root)
            return
    if "type" not in keys and keys:
        about = [one for one, own in _OF_TYPE.items() if keys <= own]
        if not about:
            raise refused(path, f"must give its type beside {sorted(keys)[0]}")
        schema["type"] = "number" if "number" in about else about[0]
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)
    types = types_of(schema)
    known = frozenset[str]().union(*(_OF_TYPE[one] for one in types))
    _refuse_others(path, keys - known - {"type"}, f"for the type {', '.join(types)}")
    _check_values(path, schema)


def _check_decider(path: str, decider: str, schema: dict[str, Any], root: Any) -> None:
    if decider == "oneOf":
        cases, told_by = schema.pop("oneOf"), schema.pop("discriminator", {}).get("propertyName")
        for one in [_resolved(one, root) for one in cases if isinstance(told_by, str)]:
            if isinstance(one, dict) and told_by in one.get("properties", {}):
                one["required"] = list(dict.fromkeys((*one.get("required", ()), told_by)))
        if not all(_are_disjoint(one, other, root) for i, one in enumerate(cases) for other in cases[:i]):
            raise refused(f"{path}/oneOf", "must have schemas of which each value matches one at most; use anyOf")
        schema["anyOf"] = cases
    if decider in ("const", "enum") and not all(map(_is_exact, _numbers_in(schema[decider]))):
        raise refused(f"{path}/{decider}", "has an integer of more than 64 bits")
    of_types, values = types_of(schema), values_of(schema) or ()
    if of_types and not all(any(is_of(value, one) for one in of_types) for value in values):
        raise refused(f"{path}/{decider}", "has values of another type")


def _check_values(path: str, schema: dict[str, Any]) -> None:
    for key in _COUNTS:
        if isinstance(schema.get(key), float) and schema[key].is_integer():
            schema[key] = int(schema[key])
        if key in schema and not (is_of(schema[key], "integer") and 0 <= schema[key] <= MAX_REPEATS):
            raise refused(f"{path}/{key}", f"must be an integer from 0 to {MAX_REPEATS}")
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
        both = repeated(schema["pattern"], schema.pop("minLength", 0), schema.pop("maxLength", None))
        if both is None:
            raise refused(
                f"{path}/pattern", "is supported together with minLength or maxLength as one repeated character alone"
            )
        schema["pattern"] = both
    if {"pattern", "format"} <= schema.keys():
        raise refused(f"{path}/pattern", "is not supported together with format")
    if "format" in schema:
        name, bounds = schema.pop("format"), (schema.pop("minLength", 0), schema.pop("maxLength", None))
        pattern = format_pattern(name, *bounds)
        if pattern is None:
            raise refused(f"{path}/format", f"no {name} of the demanded length is known")
        schema["pattern"] = pattern
    if "pattern" in schema and (reason := pattern_fault(schema["pattern"])) is not None:
        raise refused(f"{path}/pattern", reason)
    if schema.get("type") == "array" and not schema.keys() & {"items", "prefixItems"}:
        schema["items"] = True
    if not schema.get("properties", {}).keys() >= set(schema.get("required", ())):
        raise refused(f"{path}/required", "names a property that is not in properties")


def pattern_fault(pattern: str) -> str | None:
    """Why a regular expression cannot be enforced, in what xgrammar would ignore; None: it can."""
    if re.search(r"(?<!\\)(\\\\)*\(\?[^:]", pattern):
        return "must have no group that begins with (? but (?:"
    if re.search(r"(?<!\\)(\\\\)*\\[AZzG]", pattern):
        return "must have no anchors but ^ and $"
    bare = re.sub(rf"\\.|{CLASS}", "", pattern, flags=re.DOTALL)  # without escapes and classes
    if re.search(r"[\^$]", bare.removeprefix("^").removesuffix("$")):
        return "must have ^ at its begin only, and $ at its end only"
    return repeats_fault(pattern, is_regex=True)


def _finish(path: str, schema: dict[str, Any]) -> None:
    """Rewrites what xgrammar enforces in another form alone."""
    values = values_of(schema)
    if values is not None and any(isinstance(value, dict | list) and value for value in values):
        for key in ("const", "enum", "type"):
            schema.pop(key, None)
        schema["anyOf"] = [_constant(value) for value in values]
    if schema.get("additionalProperties") is False:
        schema.pop("propertyNames", None)  # there is no name that it could describe
    names, others = schema.get("properties", {}), schema.get("additionalProperties", False)
    if "propertyNames" in schema:
        if names:
            raise refused(f"{path}/propertyNames", "is not supported beside properties")
        if schema["propertyNames"].get("type") != "string":
            raise refused(f"{path}/propertyNames", "must describe strings")
        schema.setdefault("additionalProperties", True)
    elif names and others is not False:
        schema["propertyNames"] = {"const": placeholder(names)}
    if schema.get("minProperties", 0) > max(1, len(schema.get("required", ()))):
        raise refused(f"{path}/minProperties", "is not supported beyond 1 and the number of required properties")
    types = types_of(schema)
    if "number" in types and "integer" in types:
        schema["type"] = types = [one for one in types if one != "integer"]
    for key, whole, tighter in (("minimum", math.ceil, max), ("maximum", math.floor, min)):
        exclusive = "exclusive" + key.capitalize()
        for bound in (key, exclusive) if "integer" in types else ():
            if isinstance(schema.get(bound), float) and math.isfinite(schema[bound]):
                is_whole, value = schema[bound].is_integer(), whole(schema.pop(bound))
                own = bound if is_whole else key
                schema[own] = tighter(schema.get(own, value), value)


def _resolved(schema: Any, root: Any) -> Any:
    """What a chain of references refers to; {}, which is all, for one without an end."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = root if schema["$ref"] == "#" else root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return {}


def _are_disjoint(one: Any, other: Any, root: Any, depth: int = 0) -> bool:
    """Whether no value matches both, as far as types, constants and properties with constants tell."""
    one, other = _resolved(one, root), _resolved(other, root)
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_REFERENCES:
        return False
    for this, that in ((one, other), (other, one)):
        for kind in ("anyOf", "oneOf"):
            if isinstance(this.get(kind), list):
                return all(_are_disjoint(case, that, root, depth + 1) for case in this[kind])
        values = values_of(this)
        if values is not None and values_of(that) is None:
            return "type" in that and not any(is_of(value, kind) for value in values for kind in types_of(that))
    mine, others = values_of(one), values_of(other)
    if mine is not None and others is not None:
        return not set(map(spelled, mine)) & set(map(spelled, others))
    types = [{"number" if kind == "integer" else str(kind) for kind in _types_about(this)} for this in (one, other)]
    if not all(types) or types[0] != {"object"} or types[1] != {"object"}:
        return bool(all(types)) and not types[0] & types[1]
    named = {name for this in (one, other) for name in this.get("required", ()) if isinstance(name, str)}
    inner, others_inner = one.get("properties", {}), other.get("properties", {})
    return any(
        name in inner and name in others_inner and _are_disjoint(inner[name], others_inner[name], root, depth + 1)
        for name in named
    )


def _constant(value: Any) -> dict[str, Any]:
    """The schema of one value, which xgrammar would write without spaces."""
    if isinstance(value, dict) and value:
        properties = {name: _constant(one) for name, one in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    if isinstance(value, list) and value:
        items = [_constant(one) for one in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {"const": value}


def _types_about(schema: Mapping[str, Any]) -> list[Any]:
    return types_of(schema) if "type" in schema else ["object"] if "properties" in schema else []


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(one)
    elif isinstance(value, int):
        yield value


def _is_exact(number: int) -> bool:
    return -MAX_INTEGER <= number < MAX_INTEGER


def _refuse_others(path: str, keys: "set[str] | frozenset[str]", where: str) -> None:
    if keys:
        raise refused(f"{path}/{sorted(keys)[0]}", f"is not supported {where}")
