"""Rewrites a JSON schema to the keywords that `schema_rules` checks: references in any spelling, older drafts, OpenAPI,
annotations, and what several schemas demand at once. All that matches the rewritten schema matches the given one.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urljoin

from cluster.errors import InvalidField
from engine.grammar.schema_spellings import plain, refused, types_of, values_of

MAX_DEPTH = 64
MAX_SCHEMAS = 16384  # in one; a schema that others refer to counts again where it is merged

_DATA = frozenset({"const", "enum", "default", "examples", "example"})  # hold no schemas
_SETS = ("properties", "patternProperties")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_ANY_NAME = frozenset({"", ".*"})
_ANY_LINE = frozenset({"^.*$", "^(.*)$"})


def normal_form(schema: Any, *, names_root: bool = False) -> Any:
    """A new schema, whose references are ``#`` or begin with ``#/$defs/``.

    Args:
        names_root: the whole is one of the definitions, too, if it is referred to.

    Raises:
        InvalidField: it is not a schema, or demands what cannot be rewritten; says at which path.
    """
    return _Document(schema, names_root).normal()


def properties_apart(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of a schema whose normal form is none, or no list of properties: the normal forms of properties that have one. Each
    stands alone, with ``$defs``; references to definitions without one have no target."""
    return _Document(schema, True).properties_apart()


class _Document:
    def __init__(self, root: Any, names_root: bool) -> None:
        self._root = root
        self._names_root = names_root
        self._bases: dict[int, str] = {}  # by id() of each object: the URI from which its references start
        self._addresses: dict[str, Any] = {"": root}
        self._index()
        self._names: dict[int, str] = {}  # of definitions, by id() of what they define
        self._waiting: list[tuple[str, Any]] = []  # definitions that are not rewritten yet
        self._num_schemas = 0

    def normal(self) -> Any:
        found, definitions = self._node(self._root, "", "#", 0), dict[str, Any]()
        while self._waiting:
            name, target = self._waiting.pop()
            definitions[name] = self._node(target, "", f"#/$defs/{name}", 0)
        return {**found, "$defs": definitions} if definitions and isinstance(found, dict) else found

    def properties_apart(self) -> dict[str, Any]:
        given = self._root.get("properties")
        found, definitions = dict[str, Any](), dict[str, Any]()
        for name, one in given.items() if isinstance(given, dict) else ():
            with suppress(InvalidField):
                found[name] = self._node(one, "", f"#/properties/{name}", 0)
        while self._waiting:
            name, target = self._waiting.pop()
            with suppress(InvalidField):
                definitions[name] = self._node(target, "", f"#/$defs/{name}", 0)
        return {name: {**one, "$defs": definitions} if isinstance(one, dict) else one for name, one in found.items()}

    def _index(self) -> None:
        stack = [(self._root, "")]
        while stack:
            one, base = stack.pop()
            if isinstance(one, list):
                stack += [(inner, base) for inner in one]
            if not isinstance(one, dict):
                continue
            own = one.get("$id")
            if isinstance(own, str) and own.startswith("#"):  # an anchor, until draft 7
                self._addresses.setdefault(base + own, one)
            elif isinstance(own, str):
                base = _joined(base, own).removesuffix("#")
                self._addresses.setdefault(base, one)
            for anchor in (one.get("$anchor"), one.get("$dynamicAnchor")):
                if isinstance(anchor, str):
                    self._addresses.setdefault(f"{base}#{anchor}", one)
            self._bases[id(one)] = base
            stack += [(inner, base) for key, inner in one.items() if key not in _DATA]

    def _node(self, one: Any, base: str, path: str, depth: int, *, inline: bool = False) -> Any:
        """``inline``: the result, and none of its alternatives, is a reference."""
        if isinstance(one, bool):
            return one
        if not isinstance(one, dict):
            raise refused(path, "must be an object")
        self._num_schemas += 1
        if depth > MAX_DEPTH:
            raise refused(path, f"lies deeper than {MAX_DEPTH} levels")
        if self._num_schemas > MAX_SCHEMAS:
            raise refused(path, f"is one of more than {MAX_SCHEMAS} schemas")
        base = self._bases.get(id(one), base)
        schema = plain(one, path)
        if schema.get("nullable") is True:
            return self._node(_nullable(schema), base, path, depth + 1, inline=inline)
        if "not" in schema and schema["not"] in (True, {}):
            return False
        for key in _SETS:
            if key in schema:
                inner = schema[key].items()
                schema[key] = {name: self._node(one, base, f"{path}/{key}/{name}", depth + 1) for name, one in inner}
        if "prefixItems" in schema:
            listed = enumerate(schema["prefixItems"])
            schema["prefixItems"] = [self._node(one, base, f"{path}/prefixItems/{i}", depth + 1) for i, one in listed]
        for key in ("items", "additionalProperties", *_UNEVALUATED, "propertyNames"):
            if key in schema:
                schema[key] = self._node(schema[key], base, f"{path}/{key}", depth + 1, inline=key == "propertyNames")
        return self._of_parts(schema, base, path, depth, inline=inline)

    def _of_parts(self, schema: dict[str, Any], base: str, path: str, depth: int, *, inline: bool) -> Any:
        """What ``$ref``, ``allOf``, ``anyOf`` and ``oneOf`` demand together with the keywords beside them."""
        rest: dict[str, Any] = {key: schema.pop(key) for key in _UNEVALUATED if key in schema}
        reference, listed = schema.pop("$ref", None), schema.pop("allOf", [])
        kinds = [kind for kind in ("anyOf", "oneOf") if kind in schema]
        is_single = (reference is not None) + len(listed) + len(kinds) + bool(schema.keys() - {*kinds, "discriminator"}) == 1
        inline = inline or not is_single or bool(rest)
        parts = []
        if reference is not None:
            parts.append(self._reference(reference, base, path, depth, inline=inline))
        parts += [self._node(one, base, f"{path}/allOf/{i}", depth + 1, inline=inline) for i, one in enumerate(listed)]
        for kind in kinds:
            cases = schema.pop(kind)
            listed = [self._node(one, base, f"{path}/{kind}/{i}", depth + 1, inline=inline) for i, one in enumerate(cases)]
            listed = [one for one in listed if one is not False]
            told_by = {"discriminator": schema.pop("discriminator")} if kind == "oneOf" and "discriminator" in schema else {}
            parts.append({kind: listed, **told_by} if listed else False)
        found: Any = _of_one(schema, path)
        for part in parts:
            try:
                found = merged(found, part)
            except NotMergeable as error:
                raise refused(path, f"what it demands at once cannot be merged: {error}") from error
        return _closed(found, rest, path)

    def _reference(self, reference: Any, base: str, path: str, depth: int, *, inline: bool) -> Any:
        target, last = self._target(reference, base, f"{path}/$ref")
        if inline or isinstance(target, bool):
            return self._node(target, base, path, depth + 1, inline=True)
        if target is self._root and not self._names_root:
            return {"$ref": "#"}
        if id(target) not in self._names:
            name = re.sub(r"[^\w.-]", "_", last, flags=re.ASCII) or "_"
            while name in self._names.values():
                name += "_"
            self._names[id(target)] = name
            self._waiting.append((name, target))
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}

    def _target(self, reference: Any, base: str, path: str) -> tuple[Any, str]:
        """What a reference refers to, and the last part of its address."""
        if not isinstance(reference, str):
            raise refused(path, "must be a string")
        address = unquote(_joined(base, reference)).removesuffix("#")
        if address in self._addresses:
            return self._addresses[address], re.split("[/#]", address)[-1]
        document, _, pointer = address.partition("#")
        if document not in self._addresses:
            raise refused(path, f"refers to {reference[:80]!r}: references to other documents are not followed")
        at, parts = self._addresses[document], pointer.split("/")
        if parts[0]:
            raise refused(path, f"{reference[:80]!r} is not in the schema")
        for part in parts[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, dict) and name in at:
                at = at[name]
            else:
                raise refused(path, f"{reference[:80]!r} is not in the schema")
        return at, parts[-1]


def _joined(base: str, reference: str) -> str:
    return base.partition("#")[0] + reference if reference.startswith("#") else urljoin(base, reference)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0: null, too."""
    rest = {key: value for key, value in schema.items() if key != "nullable"}
    values = rest.get("enum", [None])
    if "const" in rest or not isinstance(values, list) or None not in values:
        return rest
    if "enum" in rest:
        rest["enum"] = [value for value in values if value is not None]
    return {"anyOf": [rest, {"type": "null"}]}


def _of_one(schema: dict[str, Any], path: str) -> Any:
    """Without what one schema says in several keywords."""
    patterns = schema.get("patternProperties")
    if patterns is not None and len(patterns) == 1 and schema.get("additionalProperties", False) is False:
        pattern, inner = next(iter(patterns.items()))
        if pattern in _ANY_NAME or (pattern in _ANY_LINE and "additionalProperties" not in schema):
            del schema["patternProperties"]
            schema["additionalProperties"] = inner
        elif not schema.keys() & {"properties", "propertyNames"}:
            del schema["patternProperties"]
            schema |= {"propertyNames": {"pattern": pattern}, "additionalProperties": inner}
    names = schema.get("propertyNames")
    if isinstance(names, dict) and ("enum" in names or "const" in names):
        del schema["propertyNames"]
        given, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        schema["properties"] = {name: given.get(name, other) for name in values_of(names) or () if isinstance(name, str)}
        schema["additionalProperties"] = False
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not schema.keys() & {"propertyNames", "patternProperties"}:
        missing = [name for name in required if name not in properties]
        if missing:
            schema["properties"] = properties | dict.fromkeys(missing, schema.get("additionalProperties", True))
    for name, one in tuple(schema.get("properties", {}).items()):
        if one is False:
            if name in required:
                return False
            if schema.get("additionalProperties", False) is False:
                schema["properties"].pop(name)
    return schema


def _closed(found: Any, rest: dict[str, Any], path: str) -> Any:
    """With what ``unevaluatedProperties`` and ``unevaluatedItems`` say of all that was merged."""
    if not rest or found is False:
        return found
    if found is True:
        found = {}
    for kind in ("anyOf", "oneOf"):
        if kind in found:
            return {**found, kind: [_closed(one, rest, path) for one in found[kind]]}
    closed = dict(found)
    types = types_of(found)
    for key, own, name in (
        ("unevaluatedProperties", "additionalProperties", "object"),
        ("unevaluatedItems", "items", "array"),
    ):
        if key in rest and own not in closed and (not types or name in types) and not closed.keys() & {"const", "enum"}:
            closed[own] = rest[key]
    return closed


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
    if not a or not b or spelled(a) == spelled(b):  # == takes true for 1
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
    values, allowed = values_of(one), values_of(other)
    if other.keys() - {"const", "enum", "type"}:
        raise NotMergeable(sorted(other.keys() - {"const", "enum", "type"})[0])
    types = {"type": types_of(other)} if "type" in other else {}
    assert values is not None, "one of them lists values"
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
        if key not in a or key not in b or spelled(a[key]) == spelled(b[key]):
            found[key] = a.get(key, b.get(key))
        elif key == "type":
            found[key] = _common_types(a, b)
            if not found[key]:
                return False
        elif key == "required":
            found[key] = list(dict.fromkeys((*a[key], *b[key])))
        elif key in _LEAST | _MOST and is_of(a[key], "number") and is_of(b[key], "number"):
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
