"""Calls whose parameters are elements with plain text: ``<parameter=city>Paris</parameter>``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.api.answer_parts import Arguments, CallStart, num_begun
from deploy.api.messages import Tool
from deploy.api.tool_formats import MAX_HEAD_LEN, CallReader, Head
from deploy.api.tool_formats.json_call import JsonDepth
from deploy.api.tool_formats.parameters import ALL_TYPES, STRING, Parameters, json_type
from deploy.api.tool_formats.python_call import checked_json, json_of_literal


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
