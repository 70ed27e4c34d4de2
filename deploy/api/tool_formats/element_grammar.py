"""Grammars of arguments that are elements with plain text, such that what is parsed of them matches the schema."""

from collections.abc import Callable, Iterable
from typing import Any

from deploy.api.grammar_parts import ANY_TEXT, Format, any_of, arguments, json_format, pattern, sequence, spelled, tag
from deploy.api.messages import Tool
from deploy.api.tool_formats.values import FORMATS, plain_of, resolved

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_LISTED = {"type", "properties", "required", "additionalProperties", "$defs", *_ANNOTATIONS}
_BOUNDS = {"minLength", "maxLength"}
_MAX_BOUND = 65_536  # of a string's length
_BLOCK = 64
_MAX_DEPTH = 8  # of references and alternatives

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
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not strict or not schema.keys() <= _LISTED or not set(required) <= set(properties):
            return arguments(tool, strict, style=self._style)
        elements = []
        for key, one in properties.items():
            element = sequence(spelled([any_of(self._values(key, one, schema, 0)), "\n"], {}))
            elements.append(element if key in required else {"type": "optional", "content": element})
        return sequence(elements or [{"type": "const_string", "value": ""}])

    def _values(self, key: str, schema: Any, root: dict[str, Any], depth: int) -> Iterable[Format]:
        """The alternatives of a property."""
        schema = resolved(schema, root)
        rules = {name: rule for name, rule in schema.items() if name not in _ANNOTATIONS} if isinstance(schema, dict) else {}
        if depth < _MAX_DEPTH and len(rules) == 1 and (several := rules.get("anyOf", rules.get("oneOf"))):
            return [value for one in several for value in self._values(key, one, root, depth + 1)]
        if isinstance(rules.get("type"), list):
            kinds = [{**rules, "type": kind} for kind in rules["type"]]
            return [value for one in kinds for value in self._values(key, one, root, depth + 1)]
        if "enum" in rules or "const" in rules:
            values = [rules["const"]] if "const" in rules else rules["enum"]
            return [self._element(key, isinstance(value, str), [plain_of(value)]) for value in values]
        if rules.get("type") == "string":
            return [self._string(key, rules)]
        if not rules:
            return [self._text(key)]
        if "type" in rules:
            shared = {"$defs": root["$defs"]} if "$defs" in root else {}
            return [self._element(key, False, [json_format({**rules, **shared})])]
        return [self._in_style(key, rules, root)]

    def _string(self, key: str, rules: dict[str, Any]) -> Format:
        if rules.get("format") in FORMATS:
            return self._in_style(key, rules, {})
        if "pattern" in rules and not rules.keys() & _BOUNDS:
            return self._element(key, True, [self._break, pattern(rules["pattern"]), self._break])
        if rules.keys() & _BOUNDS and "pattern" not in rules:
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
