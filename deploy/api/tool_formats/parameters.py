"""The schema of a tool's arguments, as far as values need it that are written without JSON's quotes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cluster.errors import InvalidField
from engine.grammar.schema_spellings import OF_ARRAY, OF_NUMBER, OF_OBJECT, OF_STRING, plain

STRING = frozenset({"string"})
_MAX_DEPTH = 16  # of references and alternatives within each other
_MAX_SCHEMAS = 256  # that are read of one value: alternatives that refer to themselves multiply
_MAX_READ = 8192  # of all values together
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
ALL_TYPES = frozenset(_NAMES.values())
_LISTED = frozenset({"type", "properties", "required", "additionalProperties"})
_PART = "part"


class NotRead(Exception):
    """Says what in a schema is not understood here."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the schemas of which a value matches one.

    Args:
        types: of its values; none: any.
        rules: without annotations. Those of a string are about strings alone.
    """

    types: frozenset[str]
    rules: dict[str, Any]

    @property
    def values(self) -> list[Any] | None:
        """Those that there are, if the schema lists them."""
        return _values(self.rules)


class Parameters:
    """Of one tool."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._num_read = 0
        try:
            found = self.alternatives(schema)
        except NotRead:
            found = []
        self._rules = found[0].rules if len(found) == 1 else dict(schema)
        properties, required = self._rules.get("properties", {}), self._rules.get("required", [])
        self.properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self.required = tuple(name for name in required if isinstance(name, str)) if isinstance(required, list) else ()
        # Whether the schema demands no more than properties, some of them required.
        self.is_listed = (
            len(found) == 1
            and self._rules.keys() <= _LISTED
            and isinstance(properties, dict)
            and isinstance(required, list)
            and len(self.required) == len(required)
            and self.properties.keys() >= set(self.required)
        )

    @property
    def others(self) -> Any:
        """The schema of properties that are not listed; False: there are none."""
        return self._rules.get("additionalProperties", not self.properties)

    def types(self, key: str) -> frozenset[str]:
        """The JSON types that the schema names for a property; none where it does not say."""
        try:
            found = self.alternatives(self.properties.get(key, self.others))
        except NotRead:
            return frozenset()
        return types_of(found)

    def alternatives(self, schema: Any) -> list[Alternative]:
        """In order. Raises NotRead."""
        budget = [None] * min(_MAX_SCHEMAS, _MAX_READ - self._num_read)
        num_left = len(budget)
        try:
            return self._read(schema, _MAX_DEPTH, budget)
        finally:
            self._num_read += num_left - len(budget)

    def part(self, schema: Any) -> Any:
        """``schema``, which is part of the whole, as one that stands alone: with what it refers to."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        return {"$ref": f"{self._shared['$id']}#/{_PART}", "$defs": {_PART: {**self._shared, _PART: schema}}}

    @cached_property
    def _shared(self) -> dict[str, Any]:
        """What references may refer to."""
        text, identity = json.dumps(self._root), self._root.get("$id")
        shared = {
            key: one for key, one in self._root.items() if key != "properties" or '"#"' in text or '"#/properties' in text
        }
        return {**shared, "$id": identity if isinstance(identity, str) else "tool:"}

    def _read(self, schema: Any, depth: int, budget: list[None]) -> list[Alternative]:
        if not budget or not depth:
            raise NotRead("has too many alternatives, or some that refer to themselves")
        budget.pop()
        rules = _plain(schema)
        if rules.pop("nullable", False):
            return [*self._read(rules, depth - 1, budget), Alternative(frozenset({"null"}), {"type": "null"})]
        demands = [_types_about(rules)]
        for key, cases in self._cases(rules).items():
            each = [self._read(one, depth - 1, budget) for one in cases]
            found = [one for several in each for one in several]
            is_all = rules.keys() - {"discriminator"} in ({key}, {"$ref"})
            if is_all and (key == "anyOf" or len(each) == 1 or (key == "oneOf" and _are_apart(each))):
                return found
            demands += map(types_of, each) if key == "allOf" else [types_of(found)]
        types = frozenset.intersection(*filter(None, demands)) if any(demands) else frozenset[str]()
        if types > STRING and isinstance(rules.get("type"), list) and _values(rules) is None:
            others = Alternative(types - STRING, {**rules, "type": [kind for kind in rules["type"] if kind != "string"]})
            return [*self._read({**rules, "type": "string"}, depth - 1, budget), others]
        return [Alternative(types, rules)]

    def _cases(self, rules: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The schemas of which the value matches one or all, by keyword; a reference is one of ``allOf``."""
        found = {key: rules[key] for key in ("anyOf", "oneOf", "allOf") if key in rules}
        if not all(isinstance(cases, list) for cases in found.values()):
            raise NotRead(f"must have lists of schemas in {', '.join(found)}")
        if "$ref" in rules:
            found["allOf"] = [*found.get("allOf", ()), self._target(rules["$ref"])]
        return found

    def _target(self, reference: Any) -> Any:
        found: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise NotRead("refers to another document")
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise NotRead(f"{reference[:80]!r} is not in the schema")
        return found


def types_of(alternatives: Iterable[Alternative]) -> frozenset[str]:
    """Of all of them; none: any type."""
    each = [one.types for one in alternatives]
    return frozenset().union(*each) if all(each) else frozenset()


def _plain(schema: Any) -> dict[str, Any]:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise NotRead("has no schema that allows a value")
    step = {key: value for key, value in schema.items() if key == "multipleOf" and schema.get("type") != "string"}
    try:
        return plain({key: value for key, value in schema.items() if key != "multipleOf"}, "") | step
    except InvalidField as error:
        raise NotRead(error.reason) from error


def _values(rules: Mapping[str, Any]) -> list[Any] | None:
    values = [rules["const"]] if "const" in rules else rules.get("enum")
    return values if isinstance(values, list) else None


def _types_about(rules: Mapping[str, Any]) -> frozenset[str]:
    types, values = rules.get("type"), _values(rules)
    if isinstance(types, str | list):
        found = frozenset(kind for kind in ([types] if isinstance(types, str) else types) if isinstance(kind, str))
    elif values is not None:
        found = frozenset(_NAMES[type(value)] for value in values if type(value) in _NAMES)
    else:
        own = {"string": OF_STRING, "number": OF_NUMBER, "array": OF_ARRAY, "object": OF_OBJECT}
        about = [kind for kind, keys in own.items() if keys & rules.keys()]
        found = frozenset(about if len(about) == 1 else ())
    return found | {"integer"} if "number" in found else found


def _are_apart(each: Sequence[list[Alternative]]) -> bool:
    """Whether no value matches two, as far as types and values tell."""
    values = [[value for one in several for value in one.values or ()] for several in each]
    is_listed = all(one.values for several in each for one in several)
    marks = [{json.dumps(value) for value in listed} for listed in values] if is_listed else [*map(types_of, each)]
    return all(marks) and sum(map(len, marks)) == len(set[str]().union(*marks))


def json_type(value: Any) -> str:
    return _NAMES[type(value)]
