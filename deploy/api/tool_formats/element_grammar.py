"""Grammars of arguments that are elements with plain text, such that what is parsed of them matches the schema."""

import json
from typing import Any

from cluster.errors import InvalidField
from cluster.sampling_params import MAX_GRAMMAR_CHARS
from deploy.api.errors import ApiError, bad_request
from deploy.api.messages import Tool
from deploy.api.structured import ANY_TEXT, Format, any_of, json_format, pattern, sequence, spelled, tag
from deploy.api.tool_formats.element_call import Elements, json_of_value, plain_of
from deploy.api.tool_formats.parameters import STRING, Parameters, types_of
from engine.grammar.json_pattern import counted, plain_spelling
from engine.grammar.json_rules import exactly, upto_rules
from engine.grammar.schema_spellings import values_of

_CONTAINERS = {"array", "object"}
_BEGINS_VALUE = "[{(+-.0123456789"  # of another type than string
_BEGINS_BOOLEAN = "tTfF"
_LINE_ENDS = r"\n\r\u2028\u2029"
_ANY_KEY = r'[^<>"\n]{1,64}'
_IN_FORM = "in this model's form of calls it cannot be enforced"


class ElementGrammar:
    """Of the arguments of one tool: properties in the schema's order, each on a line.

    Args:
        strict: they match the tool's schema; otherwise they are any object.

    Raises:
        ApiError: 400, the schema cannot be enforced.
    """

    def __init__(self, elements: Elements, tool: Tool, *, strict: bool) -> None:
        self._elements = elements
        self._tool_name = tool.function.name
        try:
            self._parameters = Parameters(tool.function.arguments if strict else {"type": "object"}, strict=True)
        except InvalidField as error:
            raise bad_request("tools", f"{self._tool_name!r}: {error.reason}") from error
        self._tells_strings = "{is_string}" in elements.parameter.template
        self._break = "\n" if elements.on_lines else ""

    def arguments(self) -> Format:
        """Raises ApiError: 400 naming the property that cannot be enforced."""
        known = self._parameters
        if not known.is_listed:
            raise bad_request("tools", f"{self._tool_name!r}: parameters other than a list of properties {_IN_FORM}")
        found, num_chars = list[Format](), 0
        for key, schema in known.properties.items():
            element = sequence([self._property(key, schema), *spelled(["\n"], {})])
            num_chars += len(json.dumps(element))
            if num_chars > MAX_GRAMMAR_CHARS:  # definitions are repeated for each property
                raise bad_request(
                    "tools", f"{self._tool_name!r}: parameters make a grammar of more than {MAX_GRAMMAR_CHARS} characters"
                )
            found.append(element if key in known.required else {"type": "optional", "content": element})
        if not known.properties and known.others is not False:
            found.append({"type": "star", "content": sequence([self._property(None, known.others), *spelled(["\n"], {})])})
        return sequence(found or [{"type": "const_string", "value": ""}])

    def _property(self, key: str | None, schema: Any) -> Format:
        """``key``: None: any."""
        found = self._parameters.alternatives(schema)
        if key is not None:
            written = self._elements.parameter.full.fullmatch(self._elements.parameter.written(key=key, is_string="true"))
            if written is None or written["key"] != key:
                raise self._refused(key, "has a name that cannot be written")
        types = types_of(found)
        if not types:
            as_json = [self._json(key, True)] if self._tells_strings else []
            return any_of([self._text(key, ""), *as_json])
        if "string" not in types:
            return self._json(key, schema)
        excluded = "" if self._tells_strings else _mistakable(found)
        return any_of([self._alternative(key, one, types, excluded) for one in found])

    def _alternative(self, key: str | None, one: dict[str, Any], types: frozenset[str], excluded: str) -> Format:
        """``excluded``: characters with which a string may not begin, lest it is read as a value of other ``types``."""
        if (values := values_of(one)) is not None:
            return any_of([self._literal(key, value, types) for value in values])
        return self._string(key, one, excluded) if one.get("type") == "string" else self._json(key, one)

    def _literal(self, key: str | None, value: Any, types: frozenset[str]) -> Format:
        text, end = plain_of(value), self._elements.value_end
        told = STRING if self._tells_strings and isinstance(value, str) else types
        is_other = json_of_value(text, told) != json.dumps(value, ensure_ascii=False)
        is_cut = isinstance(value, str) and (text + end).find(end) < len(text)
        is_list = types & _CONTAINERS and not self._tells_strings and text.startswith(("[", "{"))
        if is_other or is_cut or (is_list and isinstance(value, str)):
            raise self._refused(key, f"has the value {text[:64]!r}, which would be read as another one")
        return self._element(key, isinstance(value, str), [text])

    def _string(self, key: str | None, rules: dict[str, Any], excluded: str) -> Format:
        regex: Any = rules.get("pattern")
        bounds = (False, rules.get("minLength", 0), rules.get("maxLength")) if regex is None else counted(regex)
        if bounds == (False, 0, None):
            return self._text(key, excluded)
        if bounds is not None:
            return self._bounded(key, bounds, excluded)
        if excluded:
            raise self._refused(key, "pattern: is not supported beside lists, objects, or numbers with bounds")
        try:
            return self._element(key, True, [pattern(plain_spelling(regex, "<"))])
        except ValueError as error:
            raise self._refused(key, f"pattern: {error}") from error

    def _text(self, key: str | None, excluded: str) -> Format:
        end = self._elements.value_end
        rest = tag("", ANY_TEXT, end)
        if not excluded:
            return sequence(spelled([*self._head(key, True), rest], {}))
        begun = any_of([sequence([_first(excluded), rest]), *spelled([end], {})])
        return sequence(spelled([*self._head(key, True), begun], {}))

    def _bounded(self, key: str | None, bounds: tuple[bool, int, int | None], excluded: str) -> Format:
        """``bounds``: whether no character ends a line, the least and the most number."""
        is_line, least, most = bounds
        if most is not None and least > most:
            raise self._refused(key, f"minLength {least} is more than maxLength {most}")
        if not excluded or most == 0:
            return self._element(key, True, [_chars(is_line, least, most)])
        rest = _chars(is_line, max(0, least - 1), None if most is None else most - 1)
        empty = [] if least else [self._element(key, True, [])]
        return any_of([self._element(key, True, [_first(excluded), rest]), *empty])

    def _json(self, key: str | None, schema: Any) -> Format:
        return self._element(key, False, [json_format(self._parameters.part(schema))])

    def _element(self, key: str | None, is_string: bool, value: list[str | Format]) -> Format:
        around = self._break
        return sequence(spelled([*self._head(key, is_string), around, *value, around, self._elements.value_end], {}))

    def _head(self, key: str | None, is_string: bool) -> list[str | Format]:
        fields = {"is_string": str(is_string).lower()}
        if key is not None:
            return [self._elements.parameter.written(key=key, **fields)]
        before, _, after = self._elements.parameter.written(**fields).partition("{key}")
        return [before, pattern(_ANY_KEY), after]

    def _refused(self, key: str | None, reason: str) -> ApiError:
        place = "additionalProperties" if key is None else f"the property {key[:64]!r}"
        return bad_request("tools", f"{self._tool_name!r}: {place} {reason}; {_IN_FORM}")


def _mistakable(alternatives: list[dict[str, Any]]) -> str:
    """The characters with which values begin that a string must not be read as."""
    found = ""
    for one in alternatives:
        others = types_of([one]) - STRING - {"null"}
        if others & _CONTAINERS or (others and one.keys() - {"type"}):
            found = found or _BEGINS_VALUE
            found += _BEGINS_BOOLEAN if "boolean" in others else ""
    return found


def _first(excluded: str) -> Format:
    return pattern(plain_spelling(r"\S", f"<{excluded}"))


def _chars(is_line: bool, least: int, most: int | None) -> Format:
    """``least`` to ``most`` characters other than "<", which begins the end of a value."""
    num = None if most is None else most - least
    rules = [f"char ::= [^<{_LINE_ENDS if is_line else ''}]", *upto_rules("char", () if num is None else (num,))]
    return {
        "type": "grammar",
        "grammar": "\n".join([f"root ::= {exactly('char', least)} char_{'all' if num is None else num}", *rules]),
    }
