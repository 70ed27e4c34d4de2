"""Finds tool calls in an answer's text, in the forms that chat templates teach. Arguments are passed on as they arrive.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen and SmolLM2 write; lists, too
    llama3_json   the whole answer is {"name": ..., "parameters": {...}}, several separated by ";"
    mistral       [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name{...} from version 11 on

Text that has no such form is content.
"""

import json
from collections.abc import Collection, Mapping

from deploy.api.answer_parts import Arguments, CallStart, Part, Text, merged, releasable


class _JsonDepth:
    """Nesting of JSON text, character by character."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def feed(self, char: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class _Call:
    """One call while it is read: an object with a name and arguments, or the arguments alone if ``name`` is known.

    Args:
        names: names of tools; a call of another is not a call. None: any.
        needs_arguments: an object without arguments is not a call.
    """

    def __init__(
        self, index: int, name: str | None = None, names: Collection[str] | None = None, needs_arguments: bool = False
    ) -> None:
        self.index = index
        self.started = False
        self.done = False
        self.failed = False  # it is no call; ``raw`` is content
        self.raw = ""  # as long as it is not started
        self.parts: list[Part] = []
        self._json = _JsonDepth()
        self._name = name
        self._names = names
        self._needs_arguments = needs_arguments
        self._bare = name is not None
        self._role = "key"
        self._key = ""
        self._member = ""
        self._arguments = ""  # read before the name
        self._has_arguments = False  # a second member of this meaning is ignored
        if name is not None:
            self._start()

    @property
    def is_cut(self) -> bool:
        """Whether its arguments are not complete."""
        in_arguments = self._role == "value" and self._key in ("arguments", "parameters") and self._member[:1] == "{"
        has_object = in_arguments and self._json.depth == 1 and not self._json.in_string
        return self.started and not (self.done or self._has_arguments or has_object)

    def feed(self, text: str) -> int:
        """How many characters belong to the call; all, unless it is done or has failed."""
        for i, char in enumerate(text):
            if not self.started:
                self.raw += char
            if self._bare:
                self.parts.append(Arguments(self.index, char))
                self._json.feed(char)
                self.done = self._json.depth == 0 and not self._json.in_string
            else:
                self._member_char(char)
            if self.done or self.failed:
                return i + 1
        return len(text)

    def _member_char(self, char: str) -> None:
        was_string, depth = self._json.in_string, self._json.depth
        self._json.feed(char)
        if depth == 0:  # the opening brace
            return
        is_outer = depth == 1 and not was_string
        if is_outer and char in ",}" and self._role in ("value", "key"):
            if self._role == "value":
                self._end_member()
            self._role, self._member = "key", ""
            if char == "}":
                self._end()
        elif self._role == "key":
            self._member += char
            if was_string and not self._json.in_string:
                self._key, self._role = _string(self._member) or "", "colon"
            elif not self._json.in_string and not char.isspace():
                self.failed = True
        elif self._role == "colon":
            if char == ":":
                self._role, self._member = "value", ""
            elif not char.isspace():
                self.failed = True
        else:
            self._value_char(char, was_string, depth)

    def _value_char(self, char: str, was_string: bool, was_depth: int) -> None:
        if not self._member and char.isspace():
            return
        is_complete = self._member[:1] == "{" and self._member[-1:] == "}" and was_depth == 1 and not was_string
        if is_complete:  # whitespace after an object
            self.failed |= not char.isspace()
            return
        self._member += char
        if self._key in ("arguments", "parameters") and self._member[0] == "{" and not self._has_arguments:
            if not self.started:
                self._start()
            if self.started:
                self.parts.append(Arguments(self.index, char))

    def _end_member(self) -> None:
        value = self._member.strip()
        if self._key == "name" and self._name is None:
            self._name = _string(value)
            if self._arguments:
                self._start()
        elif self._key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            arguments = _string(value) if value[:1] == '"' else value  # some models write them as a string
            arguments = "{}" if arguments in (None, "", "null") else arguments
            if not self.started:
                self._arguments = arguments
                self._start()
            elif value[:1] != "{":
                self.parts.append(Arguments(self.index, arguments))

    def _start(self) -> None:
        """Begins the call if its name is known."""
        if self.started or not self._name:
            return
        if self._names is not None and self._name not in self._names:
            return
        self.started = True
        self.raw = ""
        self.parts.append(CallStart(self.index, self._name))
        if self._arguments:
            self.parts.append(Arguments(self.index, self._arguments))

    def _end(self) -> None:
        self.done = True
        if not self.started and not self._needs_arguments:
            self._arguments = self._arguments or "{}"
            self._start()
        self.failed = not self.started


class _Scanner:
    """Common to all forms: text, then calls, then text again."""

    begin = ""  # marker of calls
    end_marker = ""
    skipped = ""  # characters between calls, beside whitespace
    needs_arguments = False

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._held = ""
        self._opening = ""  # marker and whitespace before the call, content if it is none
        self._skipped: list[str] = []  # since then, or since the last call
        self._state = "text"
        self._call: _Call | None = None
        self._num_calls = 0
        self.is_cut = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        call, self._call = self._call, None
        if call is not None:
            self.is_cut = call.is_cut
            held = self._opening + call.raw if not call.started else ""
        elif self._state == "calls":
            held = "" if not self._opening else self._opening + self._take_skipped() + held
        return [Text(held)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        """Consumes what can be decided. Whether the rest is to be looked at again."""
        if self._call is not None:
            return self._read_call(self._call, parts)
        return self._read_text(parts) if self._state == "text" else self._read_between(parts)

    def _read_text(self, parts: list[Part]) -> bool:
        found = self._held.find(self.begin)
        released = self._held[:found].rstrip() if found >= 0 else releasable(self._held, self.begin)
        if released:
            parts.append(Text(released))
        if found < 0:
            self._held = self._held[len(released) :]
            return False
        self._opening = self._held[len(released) : found] + self.begin
        self._held, self._state = self._held[found + len(self.begin) :], "calls"
        return True

    def _read_between(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(" \t\r\n" + self.skipped)
        self._skipped.append(self._held[: len(self._held) - len(rest)])  # not read again with each delta
        self._held = rest
        if rest.startswith("{"):
            skipped = self._take_skipped()
            self._opening += skipped if self._opening else ""
            self._call = _Call(self._num_calls, names=self._names or None, needs_arguments=self.needs_arguments)
            return True
        if self.end_marker and rest.startswith(self.end_marker):
            if self._opening:  # nothing was called
                parts.append(Text(self._opening + self._take_skipped() + self.end_marker))
            self._to_text(rest[len(self.end_marker) :])
            return bool(self._held)
        if not rest or (self.end_marker and self.end_marker.startswith(rest)):
            return False
        return self._read_other(rest, parts)

    def _read_other(self, rest: str, parts: list[Part]) -> bool:
        """Between calls: neither a call nor the end marker, so the rest is text again."""
        before = self._opening + self._take_skipped()
        if before:
            parts.append(Text(before))
        self._to_text(rest)
        return True

    def _take_skipped(self) -> str:
        skipped = "".join(self._skipped)
        self._skipped.clear()
        return skipped

    def _read_call(self, call: _Call, parts: list[Part]) -> bool:
        num_read = call.feed(self._held)
        self._held = self._held[num_read:]
        parts += merged(call.parts)
        call.parts = []
        if call.failed and not call.started:
            self._call = None
            parts.append(Text(self._opening + call.raw))
            self._to_text(self._held)
        elif call.done or call.failed:
            self._call = None
            self._opening = ""
            self._num_calls += 1
        return bool(self._held)

    def _to_text(self, held: str) -> None:
        self._state, self._opening, self._held = "text", "", held
        self._skipped.clear()


class HermesParser(_Scanner):
    begin = "<tool_call>"
    end_marker = "</tool_call>"
    skipped = "[],"

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()  # a call of an unknown tool is a call: the caller sees which


class Llama3JsonParser(_Scanner):
    """An answer that begins with JSON may be no call: only calls of known tools, with parameters, count."""

    begin = "<|python_tag|>"
    skipped = ";"
    needs_arguments = True

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._begins = True

    def _read_text(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        if not self._begins:
            if self._held:
                parts.append(Text(self._held))
            self._held = ""
            return False
        if rest.startswith((self.begin, "{")):
            num_skipped = len(self._held) - len(rest) + (len(self.begin) if rest[0] != "{" else 0)
            self._opening, self._held = self._held[:num_skipped], self._held[num_skipped:]
            self._begins, self._state = False, "calls"
            return True
        if not self.begin.startswith(rest):
            self._begins = False
            return True
        return False


class MistralParser(_Scanner):
    begin = "[TOOL_CALLS]"
    skipped = "[],"

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()

    def _read_between(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(" \t\r\n],")
        if rest.startswith(self.begin) and not self._opening:  # the next call of version 11
            self._opening, self._held = self.begin, rest[len(self.begin) :]
            self._skipped.clear()
            return True
        if rest and self.begin.startswith(rest):
            return False
        return super()._read_between(parts)

    def _read_other(self, rest: str, parts: list[Part]) -> bool:
        """``name{...}``, ``name[ARGS]{...}`` or ``name[CALL_ID]id[ARGS]{...}``."""
        head, brace, _ = rest.partition("{")
        name = head.partition("[")[0].strip()
        is_name = len(name) <= _MAX_NAME_LEN and all(char.isalnum() or char in "_.-" for char in name)
        if not self._opening or not is_name or len(head) > _MAX_HEAD_LEN:
            return super()._read_other(rest, parts)
        if not brace:
            return False
        self._held = rest[len(head) :]
        self._skipped.clear()
        self._call = _Call(self._num_calls, name)
        return True


_MAX_NAME_LEN = 64
_MAX_HEAD_LEN = 256  # of Mistral: name, call ID and markers

TOOL_PARSERS: Mapping[str, type[_Scanner]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}


def _string(text: str) -> str | None:
    """The value of a JSON string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
