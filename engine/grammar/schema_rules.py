"""Which JSON schemas and patterns can be enforced. xgrammar ignores some keywords, and some beside others, and would let
invalid output pass: those are refused. A schema without a type gets the one that its keywords are about; formats that
xgrammar does not know are annotations, as JSON Schema has it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.errors import InvalidField

MAX_DEPTH = 64
MAX_REPEATS = 4096  # of minLength, minItems and the like

_NOTES = frozenset(
    {"title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly"}
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_ALWAYS = _NOTES | _DEFINITIONS
# What is enforced beside the keyword that decides what kind of schema it is; the first that a schema has decides.
_BESIDE: tuple[tuple[str, frozenset[str]], ...] = (
    ("$ref", frozenset()),
    ("const", frozenset({"type"})),
    ("enum", frozenset({"type"})),
    ("anyOf", frozenset()),
    ("oneOf", frozenset()),
    ("allOf", frozenset()),
)
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_FORMATS = frozenset({"date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname"})


def checked(source: str) -> tuple[str, frozenset[str]]:
    """The schema to compile, all of whose outputs match ``source``, and the names that any of its objects require.

    Raises:
        InvalidField: it is not JSON, not a schema, or one that cannot be enforced; says at which path.
    """
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidField("json_schema", source[:80], f"is not JSON: {error}") from error
    required = check_schema(schema)
    return json.dumps(schema, ensure_ascii=False), required


def check_schema(schema: Any) -> frozenset[str]:
    """Completes a schema to the one to compile. The names that any of its objects require. Raises as ``checked``."""
    required: set[str] = set()
    for path, one in _walk(schema, "#", 0):
        _check(path, one, schema)
        required.update(one.get("required", ()))
    return frozenset(required)


def _walk(schema: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if schema is True:
        return
    if not isinstance(schema, dict):
        raise _refused(path, "must be an object" if schema is not False else "allows nothing")
    if depth > MAX_DEPTH:
        raise _refused(path, f"lies deeper than {MAX_DEPTH} levels")
    yield path, schema
    for key in ("properties", *_DEFINITIONS):
        inner = schema.get(key, {})
        if not isinstance(inner, dict):
            raise _refused(f"{path}/{key}", "must be an object")
        for name, one in inner.items():
            yield from _walk(one, f"{path}/{key}/{name}", depth + 1)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        several = schema.get(key, [])
        if not isinstance(several, list) or (key in schema and not several):
            raise _refused(f"{path}/{key}", "must be a list of schemas")
        for i, one in enumerate(several):
            yield from _walk(one, f"{path}/{key}/{i}", depth + 1)
    for key in ("items", "additionalProperties"):
        if schema.get(key, False) is not False:
            yield from _walk(schema[key], f"{path}/{key}", depth + 1)


def _check(path: str, schema: dict[str, Any], root: Any) -> None:
    keys = schema.keys() - _ALWAYS
    for decider, beside in _BESIDE:
        if decider in keys:
            _refuse_others(path, keys - beside - {decider}, f"beside {decider}")
            _check_decider(path, decider, schema, root)
            return
    if "type" not in keys and keys:
        about = [one for one, own in _OF_TYPE.items() if keys <= own]
        if not about:
            raise _refused(path, f"must give its type beside {sorted(keys)[0]}")
        schema["type"] = "number" if "number" in about else about[0]
    if not isinstance(schema.get("format", ""), str):
        raise _refused(f"{path}/format", "must be a string")
    if schema.get("format") not in _FORMATS:
        schema.pop("format", None)
    types = _types(schema)
    if "type" in schema and not (types and all(isinstance(one, str) and one in _OF_TYPE for one in types)):
        raise _refused(f"{path}/type", f"must be of {', '.join(_OF_TYPE)}")
    known = frozenset[str]().union(*(_OF_TYPE[one] for one in types))
    _refuse_others(path, keys - known - {"type"}, f"for the type {', '.join(types)}")
    _check_values(path, schema)


def _check_decider(path: str, decider: str, schema: dict[str, Any], root: Any) -> None:
    if decider == "$ref":
        _resolve(path, schema["$ref"], root)
    elif decider == "enum" and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise _refused(f"{path}/enum", "must be a list of values")
    elif decider in ("anyOf", "oneOf", "allOf") and not isinstance(schema[decider], list):
        raise _refused(f"{path}/{decider}", "must be a list of schemas")
    elif decider == "allOf" and len(schema["allOf"]) > 1:
        raise _refused(f"{path}/allOf", "is supported with one schema only")
    elif decider == "oneOf" and not _are_disjoint(schema["oneOf"]):
        raise _refused(f"{path}/oneOf", "must have schemas of different types; use anyOf")
    elif decider == "oneOf":
        schema["anyOf"] = schema.pop("oneOf")
    if "type" in schema and decider in ("const", "enum"):
        values = [schema["const"]] if decider == "const" else schema["enum"]
        if not all(any(_is_of(value, one) for one in _types(schema)) for value in values):
            raise _refused(f"{path}/{decider}", "has values of another type")


def _check_values(path: str, schema: dict[str, Any]) -> None:
    for key in _COUNTS:
        if isinstance(schema.get(key), float) and schema[key].is_integer():
            schema[key] = int(schema[key])
        if key in schema and not (_is_of(schema[key], "integer") and 0 <= schema[key] <= MAX_REPEATS):
            raise _refused(f"{path}/{key}", f"must be an integer from 0 to {MAX_REPEATS}")
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength", "format"}:
        raise _refused(f"{path}/pattern", "is not supported together with minLength, maxLength or format")
    if "format" in schema and schema.keys() & {"minLength", "maxLength"}:
        raise _refused(f"{path}/format", "is not supported together with minLength or maxLength")
    if "pattern" in schema:
        reason = "must be a string" if not isinstance(schema["pattern"], str) else pattern_fault(schema["pattern"])
        if reason is not None:
            raise _refused(f"{path}/pattern", reason)
    if schema.get("type") == "array" and not schema.keys() & {"items", "prefixItems"}:
        schema["items"] = True
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{path}/required", "must be a list of names")
    if not schema.get("properties", {}).keys() >= set(required):
        raise _refused(f"{path}/required", "names a property that is not in properties")


def pattern_fault(pattern: str) -> str | None:
    """Why a regular expression cannot be enforced, in what xgrammar would ignore; None: it can."""
    if re.search(r"(?<!\\)(\\\\)*\(\?[^:]", pattern):
        return "must have no group that begins with (? but (?:"
    if re.search(r"(?<!\\)(\\\\)*\\[AZzG]", pattern):
        return "must have no anchors but ^ and $"
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)  # without escapes and classes
    if re.search(r"[\^$]", bare.removeprefix("^").removesuffix("$")):
        return "must have ^ at its begin only, and $ at its end only"
    return None


def _resolve(path: str, reference: Any, root: Any) -> None:
    at = root
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refused(f"{path}/$ref", "must begin with #/: references to other documents are not followed")
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, dict) or name not in at:
            raise _refused(f"{path}/$ref", f"{reference[:80]!r} is not in the schema")
        at = at[name]


def _are_disjoint(schemas: list[Any]) -> bool:
    """Whether no value matches two of them, as far as types and constants tell."""
    seen: list[set[str]] = []
    for one in schemas:
        if not isinstance(one, dict):
            return False
        if "const" in one or "enum" in one:
            values = [one["const"]] if "const" in one else one["enum"]
            kinds = {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else set[str]()
        else:
            kinds = set(map(str, _types(one)))
        if not kinds or any(kinds & other for other in seen):
            return False
        seen.append(kinds)
    constants = {kind for kinds in seen for kind in kinds if kind not in _OF_TYPE}
    types = {kind for kinds in seen for kind in kinds if kind in _OF_TYPE}
    if {"integer", "number"} <= types:
        return False
    return not any(_is_of(json.loads(value), one) for value in constants for one in types)


def _types(schema: Mapping[str, Any]) -> list[Any]:
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _is_of(value: Any, type_name: str) -> bool:
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


def _refuse_others(path: str, keys: "set[str] | frozenset[str]", where: str) -> None:
    if keys:
        raise _refused(f"{path}/{sorted(keys)[0]}", f"is not supported {where}")


def _refused(path: str, reason: str) -> InvalidField:
    return InvalidField("json_schema", path, f"at {path}: {reason}")
