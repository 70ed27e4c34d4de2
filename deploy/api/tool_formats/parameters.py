"""The schema of a tool's arguments, as far as values need it that are written without JSON's quotes."""

import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidField
from engine.grammar.schema_forms import normal_form, properties_apart
from engine.grammar.schema_rules import read_schema
from engine.grammar.schema_spellings import OF_ARRAY, OF_NUMBER, OF_OBJECT, OF_STRING, values_of

STRING = frozenset({"string"})
_MAX_SCHEMAS = 256  # that are read of one value: alternatives that refer to themselves multiply
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
ALL_TYPES = frozenset(_NAMES.values())
_OWN = {"string": OF_STRING, "number": OF_NUMBER, "array": OF_ARRAY, "object": OF_OBJECT}
_LISTED = {"type", "properties", "required", "additionalProperties", "$defs"}


class Parameters:
    """Of one tool.

    Args:
        strict: what cannot be enforced is refused.

    Raises:
        InvalidField: ``strict``, and the schema cannot be enforced; says why.
    """

    def __init__(self, schema: Mapping[str, Any], *, strict: bool = False) -> None:
        self._types: dict[str, frozenset[str]] = {}  # by property
        self.is_listed = True  # the schema demands no more than properties, some of them required
        try:
            whole = read_schema(schema) if strict else normal_form(schema, names_root=True)
        except InvalidField:
            if strict:
                raise
            whole, self.is_listed = {}, False
        self._definitions: dict[str, Any] = whole.get("$defs", {}) if isinstance(whole, dict) else {}
        found = [{}] if whole is True else self.alternatives(whole)
        rules: dict[str, Any] = found[0] if len(found) == 1 else {}
        self.is_listed &= len(found) == 1 and rules.keys() <= _LISTED
        self.properties: dict[str, Any] = rules.get("properties", {})
        self.required: list[str] = rules.get("required", [])
        self.others: Any = rules.get("additionalProperties", not self.properties)  # False: there are none
        self._apart = {} if self.is_listed else properties_apart(schema)

    def types(self, key: str) -> frozenset[str]:
        """The JSON types that the schema names for a property; none where it does not say."""
        if key not in self._types:
            try:
                found = self.alternatives(self.properties.get(key, self._apart.get(key, self.others)))
            except InvalidField:
                found = []
            self._types[key] = types_of(found)
        return self._types[key]

    def alternatives(self, schema: Any) -> list[dict[str, Any]]:
        """The schemas of which a value matches one, in order, without references. Those of a string are about strings alone.

        Raises InvalidField: they have no end, or refer to what is no schema.
        """
        found, waiting = list[dict[str, Any]](), [schema]
        definitions = schema["$defs"] if isinstance(schema, dict) and "$defs" in schema else self._definitions
        for _ in range(_MAX_SCHEMAS):
            if not waiting:
                return found
            one = waiting.pop(0)
            if isinstance(one, bool):
                found += [{}] if one else []
                continue
            kinds = one.get("type")
            cases = one.get("anyOf", one.get("oneOf"))
            if "$ref" in one:
                name = one["$ref"].removeprefix("#/$defs/")
                if name not in definitions:
                    raise InvalidField("tools", name, "refers to what is no schema")
                waiting.insert(0, definitions[name])
            elif cases is not None:
                waiting[:0] = cases
            elif isinstance(kinds, list) and "string" in kinds and values_of(one) is None:
                found += [{**one, "type": "string"}, {**one, "type": [kind for kind in kinds if kind != "string"]}]
            else:
                found.append(one)
        raise InvalidField("tools", "", "has too many alternatives, or some that refer to themselves")

    def part(self, schema: Any) -> Any:
        """``schema``, which is part of the whole, as one that stands alone: with what it refers to."""
        found, waiting = dict[str, Any](), [schema]
        while waiting:
            for name in re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(waiting.pop())):
                if name in self._definitions and name not in found:
                    found[name] = self._definitions[name]
                    waiting.append(found[name])
        return {**schema, "$defs": found} if found else schema


def types_of(alternatives: list[dict[str, Any]]) -> frozenset[str]:
    """Of all of them; none: any type."""
    each = [_types_about(one) for one in alternatives]
    return frozenset().union(*each) if all(each) else frozenset()


def _types_about(rules: Mapping[str, Any]) -> frozenset[str]:
    types, values = rules.get("type"), values_of(rules)
    if types is not None:
        found = frozenset([types] if isinstance(types, str) else types)
    elif values is not None:
        found = frozenset(_NAMES[kind] for kind in set(map(type, values)))
    else:
        about = [kind for kind, keys in _OWN.items() if keys & rules.keys()]
        found = frozenset(about if len(about) == 1 else ())
    return found | {"integer"} if "number" in found else found


def json_type(value: Any) -> str:
    return _NAMES[type(value)]
