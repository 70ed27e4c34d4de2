"""Values of parameters that are written as plain text, as JSON of the type that the tool's schema declares."""

import json
from typing import Any

from deploy.api.tool_formats.parameters import STRING, json_type
from deploy.api.tool_formats.python_text import checked_json, json_of_literal


def json_of_value(text: str, types: frozenset[str]) -> str:
    """JSON of a value's text. A text that is no value of another type is a string."""
    if types != STRING:
        stripped = text.strip()
        found = checked_json(stripped) or json_of_literal(stripped)
        if found is not None and ("string" not in types or json_type(json.loads(found, parse_int=len)) in types - STRING):
            return found
    return json.dumps(text, ensure_ascii=False)


def plain_of(value: Any) -> str:
    """A value as plain text: a string as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
