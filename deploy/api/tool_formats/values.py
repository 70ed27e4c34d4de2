"""Values of parameters that are written as plain text, as JSON of the type that the tool's schema declares."""

import json
from collections.abc import Mapping
from typing import Any

from deploy.api.tool_formats.python_text import checked_json, json_of_literal

STRING = frozenset({"string"})
FORMATS = frozenset({"date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname"})  # that are enforced
_MAX_REFERENCES = 8
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema names; none where it does not say."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return frozenset()
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(one for one in declared if isinstance(one, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_NAMES[type(value)] for value in values if type(value) in _NAMES)
    found: frozenset[str] = frozenset()
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key, ()) if isinstance(schema.get(key), list) else ():
            found |= types_of(one, root, depth + 1)
    return found


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
