"""Calls whose parameters are elements with plain text: ``<parameter=city>Paris</parameter>``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.api.answer_parts import Arguments, CallStart
from deploy.api.messages import Tool
from deploy.api.tool_formats.heads import MAX_HEAD_LEN, Head
from deploy.api.tool_formats.scanner import CallReader, Scanner
from deploy.api.tool_formats.values import FORMATS, STRING, json_of_value, resolved, types_of


@dataclass(frozen=True, slots=True)
class Elements:
    """How a family writes them.

    Args:
        head: before the parameters; the group "name" is the function.
        parameter: before a value; the group "key" is its name, "is_string" may tell that it is a string.
        value_end: after a value.
        end: after the parameters.
        on_lines: values stand on lines of their own, so that one line break before and after is not of them.
    """

    head: Head
    parameter: Head
    value_end: str
    end: str
    on_lines: bool = False


class XmlCall(CallReader):
    """Strings are passed on as they arrive, other values when they are complete."""

    def __init__(self, index: int, elements: Elements, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(index)
        self._elements = elements
        self._schemas = schemas  # of the arguments of each tool
        self._schema: Mapping[str, Any] = {}
        self._state = "head"
        self._held = ""
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._is_passed_on = False  # the value, as it arrives
        self._has_format = False
        self._value: list[str] = []  # of one that is not passed on as it arrives
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
            self._begin_value(found["key"].strip(), found.groupdict().get("is_string"))
        return True

    def _start(self, name: str) -> None:
        self._schema = self._schemas.get(name, {})
        self.started, self.raw, self._state = True, "", "between"
        self.parts.append(CallStart(self.index, name))

    def _close(self, held: str) -> bool:
        self.done, self._held = True, held
        if self.started:
            self._emit("}" if self._keys else "{}")
        return True

    def _begin_value(self, key: str, is_string: str | None) -> None:
        properties = self._schema.get("properties")
        schema = resolved(properties.get(key), self._schema) if isinstance(properties, dict) else None
        declared = types_of(schema, self._schema)
        self._types = declared if is_string is None else STRING if is_string == "true" else declared - STRING
        self._emit(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._has_format = isinstance(schema, dict) and schema.get("format") in FORMATS
        self._is_passed_on = self._types == STRING and not self._has_format
        self._emit('"' if self._is_passed_on else "")
        self._keys.add(key)
        self._value, self._is_at_start, self._state = [], self._elements.on_lines, "value"

    def _read_value(self) -> bool:
        if self._is_at_start and self._held:
            self._is_at_start = False
            self._held = self._held.removeprefix("\n")
        end = self._elements.value_end
        found = self._held.find(end)
        if found < 0:
            num_held = next((n for n in range(min(len(end) - 1, len(self._held)), 0, -1) if self._held.endswith(end[:n])), 0)
            num_taken = len(self._held) - num_held
            num_taken -= self._elements.on_lines and self._held[:num_taken].endswith("\n")
            self._take(self._held[:num_taken])
            self._held = self._held[num_taken:]
            return False
        value = self._held[:found]
        self._take(value.removesuffix("\n") if self._elements.on_lines else value)
        self._held, self._state = self._held[found + len(end) :], "between"
        self._emit('"' if self._is_passed_on else self._written("".join(self._value)))
        return True

    def _written(self, value: str) -> str:
        """The JSON of a value. Whitespace around one of a format is not of it."""
        return json_of_value(value.strip() if self._has_format else value, self._types)

    def _take(self, text: str) -> None:
        if self._is_passed_on:
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        elif text:
            self._value.append(text)

    def _emit(self, text: str) -> None:
        if text:
            self.parts.append(Arguments(self.index, text))


class XmlScanner(Scanner):
    """Finds calls of ``elements``. The other arguments are those of `Scanner`."""

    def __init__(
        self,
        tools: Sequence[Tool],
        elements: Elements,
        begin: str,
        call_begin: str,
        end: str = "",
        *,
        is_section: bool = True,
    ) -> None:
        super().__init__(begin, call_begin, end, is_section=is_section)
        self._elements = elements
        self._schemas = {tool.function.name: tool.function.arguments for tool in tools}

    def _new_call(self, index: int) -> CallReader:
        return XmlCall(index, self._elements, self._schemas)
