"""Values of parameters that are written as plain text, as JSON of the type that the tool's schema declares."""

import json
from collections.abc import Mapping
from typing import Any

from deploy.api.tool_formats.python_text import checked_json, json_of_literal

STRING = frozenset({"string"})
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_LISTED = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs"}
FORMATS = frozenset({"date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname"})  # that are enforced
_MAX_REFERENCES = 8
_MAX_SCHEMAS = 256  # that are read of one value: alternatives that refer to themselves multiply
MAX_COPIED_CHARS = 200_000  # of a grammar's parts together
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema names; none where it does not say."""
    found, waiting = frozenset[str](), [schema]
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            break
        one = resolved(waiting.pop(), root)
        if not isinstance(one, dict):
            continue
        declared = one.get("type")
        values = [one["const"]] if "const" in one else one.get("enum")
        if isinstance(declared, str):
            found |= {declared}
        elif isinstance(declared, list):
            found |= {kind for kind in declared if isinstance(kind, str)}
        elif isinstance(values, list):
            found |= {_NAMES[type(value)] for value in values if type(value) in _NAMES}
        else:
            for key in ("anyOf", "oneOf", "allOf"):
                waiting.extend(one[key][:_MAX_SCHEMAS] if isinstance(one.get(key), list) else ())
    return found


def alternatives_of(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The schemas of which a value matches one, in order, without annotations; None: too many, or nested too deep."""
    found, waiting = list[dict[str, Any]](), [(schema, 0)]
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            return found
        one, depth = waiting.pop()
        one = resolved(one, root)
        rules = {name: rule for name, rule in one.items() if name not in ANNOTATIONS} if isinstance(one, dict) else {}
        several = rules.get("anyOf", rules.get("oneOf")) if len(rules) == 1 else None
        if isinstance(rules.get("type"), list):
            several = [{**rules, "type": kind} for kind in rules["type"][:_MAX_SCHEMAS]]
        if not isinstance(several, list):
            found.append(rules)
        elif depth == _MAX_REFERENCES:
            return None
        else:
            waiting.extend((inner, depth + 1) for inner in reversed(several[:_MAX_SCHEMAS]))
    return None


def is_list_of_properties(schema: Mapping[str, Any]) -> bool:
    """Whether an object's schema demands no more than properties, some of them required, in the form of JSON Schema."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        schema.keys() <= _LISTED
        and isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def json_of_value(text: str, types: frozenset[str]) -> str:
    """JSON of a value's text. A text that is no value of another type is a string."""
    if types != STRING:
        stripped = text.strip()
        found = checked_json(stripped) or json_of_literal(stripped)
        if found is not None and ("string" not in types or _is_any_of(json.loads(found), types - STRING)):
            return found
    return json.dumps(text, ensure_ascii=False)


def _is_any_of(value: Any, types: frozenset[str]) -> bool:
    name = _NAMES[type(value)]
    return name in types or (name == "integer" and "number" in types)


def plain_of(value: Any) -> str:
    """A value as plain text: a string as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within ``root`` refers to; other schemas as they are."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema
