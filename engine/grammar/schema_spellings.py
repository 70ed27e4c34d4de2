"""What one schema says, without its annotations, older spellings, and demands that demand nothing."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import InvalidField

OF_STRING = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
OF_ARRAY = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    }
)
OF_OBJECT = frozenset(
    {
        *("properties", "required", "additionalProperties", "propertyNames", "patternProperties", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    }
)
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": OF_STRING,
    "integer": OF_NUMBER,
    "number": OF_NUMBER,
    "array": OF_ARRAY,
    "object": OF_OBJECT,
    "boolean": frozenset(),
    "null": frozenset(),
}
_OF_A_TYPE = OF_STRING | OF_NUMBER | OF_ARRAY | OF_OBJECT
KEYWORDS = _OF_A_TYPE | {
    *(
        "type",
        "const",
        "enum",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "then",
        "else",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
    ),
    *("nullable", "discriminator", "extends", "disallow", "divisibleBy"),
}
_BY_LETTERS = {key.lower(): key for key in KEYWORDS}
# Values with which a keyword demands nothing.
_EMPTY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("minLength", "minItems", "minProperties"), (0,)),
    **dict.fromkeys(("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    "propertyNames": (True, {}, {"type": "string"}),
    "pattern": ("", "[\\s\\S]*", "^[\\s\\S]*$"),
    "required": ([],),
}


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_Check = Callable[[Any], bool]
# Of each keyword that is read: what its value must be.
_VALUES: Mapping[str, tuple[str, _Check]] = {
    **dict.fromkeys(("properties", "patternProperties"), ("an object", lambda value: isinstance(value, dict))),
    **dict.fromkeys(("anyOf", "oneOf"), ("a list of schemas", lambda value: isinstance(value, list) and bool(value))),
    **dict.fromkeys(("allOf", "prefixItems"), ("a list of schemas", lambda value: isinstance(value, list))),
    **dict.fromkeys(
        ("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "not"),
        ("a schema", _is_schema),
    ),
    "items": ("a schema", lambda value: _is_schema(value) or isinstance(value, list)),
    **dict.fromkeys(("pattern", "format", "$ref"), ("a string", lambda value: isinstance(value, str))),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), ("a finite number", _is_number)),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        ("a finite number", lambda value: isinstance(value, bool) or _is_number(value)),
    ),
    "enum": ("a list of values", lambda value: isinstance(value, list) and bool(value)),
    "required": ("a list of names", _are_names),
    "type": (
        f"of {', '.join(_OF_TYPE)}",
        lambda value: bool(value) and _are_names(_listed(value)) and _OF_TYPE.keys() >= {*_listed(value)},
    ),
}
_MAX_SHOWN = 160  # characters of a path
_NEVER = frozenset({"uniqueItems", "nullable", "exclusiveMinimum", "exclusiveMaximum", "not"})  # demand nothing as false


def plain(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A copy with the keywords of draft 2020-12 that demand something, ``nullable: true`` and ``discriminator``.

    Raises:
        InvalidField: a keyword is misspelt.
    """
    found = {key: value for key, value in schema.items() if _is_keyword(key, path)}
    for key, value in found.items():
        what, is_valid = _VALUES.get(key, ("", None))
        if is_valid is not None and not is_valid(value):
            raise refused(f"{path}/{key}", f"must be {what}")
    _modernise(found)
    types = types_of(found)
    if types:
        known = frozenset[str]().union(*(_OF_TYPE[one] for one in types))
        found = {key: value for key, value in found.items() if key in known or key not in _OF_A_TYPE}
    return {key: value for key, value in found.items() if not _is_empty(key, value)}


def _is_keyword(key: str, path: str) -> bool:
    """Whether JSON Schema knows the keyword. Other keywords are annotations, unless they look like a misspelt one."""
    likely = _BY_LETTERS.get(key.lower().replace("_", "").replace("-", ""))
    if likely not in (None, key) and key not in ("Not", "If"):
        raise refused(f"{path}/{key}", f"is not known; write {likely}")
    return key in KEYWORDS


def _is_empty(key: str, value: Any) -> bool:
    if key in _NEVER and value is False:
        return True
    if isinstance(value, dict) and key in ("propertyNames", "unevaluatedProperties", "unevaluatedItems"):
        value = {inner: one for inner, one in value.items() if inner in KEYWORDS}
    return any(value == one and type(value) is type(one) for one in _EMPTY.get(key, ()))


def _modernise(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("items"), list):  # until draft 2019-09
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
        if not schema["prefixItems"]:
            del schema["prefixItems"]
    schema.pop("additionalItems", None)  # beside another ``items`` it demands nothing
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and bound in schema:  # draft 4, OpenAPI 3.0
            schema[exclusive] = schema.pop(bound)
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    if "const" in schema and isinstance(schema.get("enum"), list) and schema["const"] in schema["enum"]:
        del schema["enum"]
    if "discriminator" in schema and not ("oneOf" in schema and isinstance(schema["discriminator"], dict)):
        del schema["discriminator"]
    _whole_numbers(schema)


def _whole_numbers(schema: dict[str, Any]) -> None:
    """Removes ``multipleOf`` where being an integer is as much."""
    step, types = schema.get("multipleOf"), types_of(schema)
    if step is None or step <= 0:
        return
    if step == 1 and "number" in types:
        types = list(dict.fromkeys("integer" if one == "number" else one for one in types))
        schema["type"] = types if len(types) > 1 else types[0]
    if "number" not in types and "integer" in types and step <= 1 and (1 / step).is_integer():
        del schema["multipleOf"]


def types_of(schema: Mapping[str, Any]) -> list[Any]:
    return _listed(schema.get("type", []))


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Those that there are, if the schema lists them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def refused(path: str, reason: str) -> InvalidField:
    if len(path) > _MAX_SHOWN:
        path = f"{path[: _MAX_SHOWN // 2]}...{path[-_MAX_SHOWN // 2 :]}"
    return InvalidField("json_schema", path, f"at {path}: {reason}")
