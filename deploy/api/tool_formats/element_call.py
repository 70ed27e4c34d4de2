"""Calls whose parameters are elements with plain text: ``<parameter=city>Paris</parameter>``; and grammars of such
arguments, so that what is parsed of them matches the schema."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidField
from cluster.sampling_params import MAX_GRAMMAR_CHARS
from deploy.api.answer_parts import Arguments, CallStart, num_begun
from deploy.api.errors import ApiError, bad_request
from deploy.api.messages import Tool
from deploy.api.structured import ANY_TEXT, Format, any_of, json_format, pattern, sequence, spelled, tag
from deploy.api.tool_formats import MAX_HEAD_LEN, CallReader, Head
from deploy.api.tool_formats.json_call import JsonDepth
from deploy.api.tool_formats.parameters import ALL_TYPES, STRING, Parameters, json_type, types_of
from deploy.api.tool_formats.python_call import checked_json, json_of_literal
from engine.grammar.json_pattern import counted, plain_spelling
from engine.grammar.json_rules import exactly, upto_rules
from engine.grammar.schema_spellings import values_of


@dataclass(frozen=True, slots=True)
class Elements:
    """How a family writes them.

    Args:
        head: before the parameters.
        parameter: before a value; it may tell whether that is a string.
        value_end: after a value. Begins with "<".
        end: after the parameters.
        on_lines: values stand on lines of their own, so that one line break before and after is not of them.
    """

    head: Head
    parameter: Head
    value_end: str
    end: str
    on_lines: bool = False


class ElementCall(CallReader):
    """Strings are passed on as they arrive, other values when they are complete."""

    def __init__(self, index: int, elements: Elements, tools: Sequence[Tool]) -> None:
        super().__init__(index)
        self._elements = elements
        self._tools = tools
        self._parameters = Parameters({})
        self._state = "head"
        self._held = ""
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._is_passed_on = False  # the value, as it arrives
        self._value: list[str] = []  # of one that is not passed on as it arrives
        self._json = JsonDepth()  # of it
        self._is_json: bool | None = None  # None: not decided
        self._is_at_start = False  # of a value

    def feed(self, text: str) -> str:
        self._held += text
        if not self.started:
            self.raw += text
        while not self.done and self._step():
            pass
        if not self.done:
            return ""
        rest, self._held = self._held, ""
        self.raw = self.raw[: len(self.raw) - len(rest)] if rest else self.raw
        return rest

    def end(self) -> str:
        if self._state == "value":
            self._take(self._held)
            self._emit("".join(self._value))
            return ""
        return "" if self._elements.end.startswith(self._held.strip()) else self._held

    def _step(self) -> bool:
        """Reads the next piece. False: more text is needed."""
        if self._state == "value":
            return self._read_value()
        head = self._elements.head if self._state == "head" else self._elements.parameter
        rest = self._held.lstrip() if self._state == "between" else self._held
        self._held = rest
        if self._state == "between" and rest.startswith(self._elements.end):
            return self._close(rest[len(self._elements.end) :])
        found = head.full.match(rest)
        if found is None:
            ends = self._state == "between" and self._elements.end.startswith(rest)
            may_come = len(rest) <= MAX_HEAD_LEN and head.partial.fullmatch(rest)
            return False if ends or may_come else self._close(rest)
        self._held = rest[found.end() :]
        if self._state == "head":
            self._start(found["name"])
        else:
            self._begin_value(found["key"], found.groupdict().get("is_string"))
        return True

    def _start(self, name: str) -> None:
        read = (tool.function.parameters_read for tool in self._tools if tool.function.name == name)
        self._parameters = next(read, self._parameters)
        self.started, self.raw, self._state = True, "", "between"
        self.parts.append(CallStart(self.index, name))

    def _close(self, held: str) -> bool:
        self.done, self._held = True, held
        if self.started:
            self._emit("}" if self._keys else "{}")
        return True

    def _begin_value(self, key: str, is_string: str | None) -> None:
        key = key if key in self._parameters.properties else key.strip()
        declared = self._parameters.types(key)
        self._types = declared
        if is_string is not None:
            self._types = STRING if is_string == "true" else (declared or ALL_TYPES) - STRING
        self._emit(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._is_passed_on = self._types == STRING
        self._emit('"' if self._is_passed_on else "")
        self._keys.add(key)
        self._value, self._is_at_start, self._state = [], self._elements.on_lines, "value"
        self._json, self._is_json = JsonDepth(), None

    def _read_value(self) -> bool:
        if self._is_at_start and self._held:
            self._is_at_start = False
            self._held = self._held.removeprefix("\n")
        end = self._elements.value_end
        found = self._held.find(end)
        if found < 0:
            num_taken = len(self._held) - num_begun(self._held, end)
            num_taken -= self._elements.on_lines and self._held[:num_taken].endswith("\n")
            self._take(self._held[:num_taken])
            self._held = self._held[num_taken:]
            return False
        value = self._held[:found].removesuffix("\n" if self._elements.on_lines else "")
        self._take(value)
        if self._is_in_json_string():
            self._take(self._held[len(value) : found + len(end)])
            self._held = self._held[found + len(end) :]
            return bool(self._held)
        self._held, self._state = self._held[found + len(end) :], "between"
        self._emit('"' if self._is_passed_on else json_of_value("".join(self._value), self._types))
        return True

    def _is_in_json_string(self) -> bool:
        """Whether the value is a list or object of JSON, and what comes next belongs to a string in it."""
        if self._json.in_string and self._is_json is None:
            text = "".join(self._value)
            may_be = self._types & {"array", "object"} and text.lstrip()[:1] in ("[", "{")
            self._is_json = bool(may_be) and ("'" not in text or json_of_literal(text) is None)
        return self._json.in_string and bool(self._is_json)

    def _take(self, text: str) -> None:
        if self._is_passed_on:
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        elif text:
            self._value.append(text)
            self._json.feed(text)

    def _emit(self, text: str) -> None:
        if text:
            self.parts.append(Arguments(self.index, text))


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
