"""Grammars of arguments that are elements with plain text, such that what is parsed of them matches the schema."""

import json
from collections.abc import Callable
from typing import Any

from deploy.api.grammar_parts import ANY_TEXT, Format, any_of, arguments, json_format, pattern, sequence, spelled, tag
from deploy.api.messages import Tool
from deploy.api.tool_formats.values import (
    FORMATS,
    MAX_COPIED_CHARS,
    alternatives_of,
    is_list_of_properties,
    plain_of,
)

_BOUNDS = {"minLength", "maxLength"}
_MAX_BOUND = 65_536  # of a string's length
_BLOCK = 64

# The text before a value, of its key and whether it is a string.
Written = Callable[[str, bool], str]


class ElementGrammar:
    """Of one family.

    Args:
        written: the text before a value.
        value_end: the text after a value.
        style: xgrammar's name of the form. It enforces what has no rule here, with whitespace around values.
        on_lines: one line break around a value is not of it.
    """

    def __init__(self, written: Written, value_end: str, style: str, *, on_lines: bool = False) -> None:
        self._written = written
        self._value_end = value_end
        self._style = style
        self._break = "\n" if on_lines else ""

    def arguments(self, tool: Tool, strict: bool | None) -> Format:
        """Properties in the schema's order, each on a line; any object where it is more than a list of properties."""
        schema = tool.function.arguments
        if not strict or not is_list_of_properties(schema):
            return arguments(tool, strict, style=self._style)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if len(properties) * len(json.dumps(schema.get("$defs"))) > MAX_COPIED_CHARS:  # each has the definitions
            return arguments(tool, strict, style=self._style)
        elements = []
        for key, one in properties.items():
            alternatives = alternatives_of(one, schema)
            if alternatives is None:
                return arguments(tool, strict, style=self._style)
            element = sequence(spelled([any_of([self._value(key, rules, schema) for rules in alternatives]), "\n"], {}))
            elements.append(element if key in required else {"type": "optional", "content": element})
        return sequence(elements or [{"type": "const_string", "value": ""}])

    def _value(self, key: str, rules: dict[str, Any], root: dict[str, Any]) -> Format:
        """One alternative of a property. What is no schema is refused when the whole grammar is checked."""
        values = [rules["const"]] if "const" in rules else rules.get("enum")
        if isinstance(values, list):
            return any_of([self._element(key, isinstance(value, str), [plain_of(value)]) for value in values])
        if rules.get("type") == "string":
            return self._string(key, rules)
        if not rules:
            return self._text(key)
        if "type" in rules:
            shared = {"$defs": root["$defs"]} if "$defs" in root else {}
            return self._element(key, False, [json_format({**rules, **shared})])
        return self._in_style(key, rules, root)

    def _string(self, key: str, rules: dict[str, Any]) -> Format:
        if rules.get("format") in FORMATS:
            return self._in_style(key, rules, {})
        bounds = [rules[name] for name in _BOUNDS & rules.keys()]
        if not all(type(bound) is int and bound >= 0 for bound in bounds):
            return self._in_style(key, rules, {})
        if isinstance(rules.get("pattern"), str) and not bounds:
            return self._element(key, True, [self._break, pattern(rules["pattern"]), self._break])
        if bounds and "pattern" not in rules:
            least, most = rules.get("minLength", 0), rules.get("maxLength")
            if max(least, most or 0) > _MAX_BOUND:
                return self._in_style(key, rules, {})
            bounded = {"type": "grammar", "grammar": _bounded(least, most)}
            return self._element(key, True, [self._break, bounded, self._break])
        return self._text(key) if rules.keys() <= {"type", "format"} else self._in_style(key, rules, {})

    def _text(self, key: str) -> Format:
        return sequence(spelled([self._written(key, True), tag("", ANY_TEXT, self._value_end)], {}))

    def _element(self, key: str, is_string: bool, value: list[str | Format]) -> Format:
        return sequence(spelled([self._written(key, is_string), *value, self._value_end], {}))

    def _in_style(self, key: str, rules: dict[str, Any], root: dict[str, Any]) -> Format:
        shared = {"$defs": root["$defs"]} if "$defs" in root else {}
        schema = {"type": "object", "properties": {key: rules}, "required": [key], "additionalProperties": False}
        return {**json_format({**schema, **shared}), "style": self._style}


def _bounded(least: int, most: int | None) -> str:
    """``least`` to ``most`` characters other than "<", which begins the end of a value. Blocks keep the rules few."""
    rules = ["char ::= [^<]", f"block ::= {'char ' * _BLOCK}", 'any ::= "" | char any', 'upto_0 ::= ""']
    rules += [f'upto_{num} ::= "" | char upto_{num - 1}' for num in range(1, _BLOCK)]
    num = -1 if most is None else most - least
    for more in range(num, _BLOCK - 1, -_BLOCK):
        rules.append(f"upto_{more} ::= upto_{_BLOCK - 1} | block upto_{more - _BLOCK}")
    blocks, chars = divmod(least, _BLOCK)
    first = " ".join([*["block"] * blocks, *["char"] * chars, "any" if most is None else f"upto_{num}"])
    return "\n".join([f"root ::= {first}", *rules])
