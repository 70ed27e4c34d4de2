"""Calls whose arguments are JSON, which is passed on as it arrives."""

import json
from collections.abc import Collection, Sequence

from deploy.api.answer_parts import Arguments, CallStart
from deploy.api.tool_formats.heads import MAX_HEAD_LEN, Head
from deploy.api.tool_formats.scanner import CallReader

_KEYS = ("arguments", "parameters")


class JsonDepth:
    """Nesting of the text of one JSON value."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.is_complete = False
        self._escaped = False

    def feed(self, text: str) -> None:
        for char in text:
            if self.is_complete:
                return
            if self.in_string:
                self.in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self.in_string = True
            else:
                self.depth += (char in "{[") - (char in "}]")
            self.is_complete = self.depth == 0 and not self.in_string and char in '"}]'


class HeadedCall(CallReader):
    """The name stands before the arguments: ``get_weather[ARGS]{...}``.

    Args:
        heads: forms of what stands before the first brace; the group "name" is the function, "id" the call's id.
        tail: marker after the arguments.
        ids: of earlier calls of the answer. A repeated id is not used.
    """

    def __init__(self, index: int, heads: Sequence[Head], tail: str = "", ids: set[str] | None = None) -> None:
        super().__init__(index)
        self._heads = heads
        self._tail = tail
        self._ids = set[str]() if ids is None else ids
        self._json = JsonDepth()
        self._is_complete = False  # the arguments
        self._after = ""  # held after them

    @property
    def is_cut(self) -> bool:
        return self.started and not self._is_complete

    def feed(self, text: str) -> str:
        if not self.started:
            text = self._read_head(text)
        if self.started and not self._is_complete:
            text = self._read_arguments(text)
        return self._read_tail(text) if self._is_complete else text

    def _read_head(self, text: str) -> str:
        head, brace, rest = text.partition("{")
        self.raw += head
        written = self.raw.rstrip()
        if not brace:
            self.done = len(self.raw) > MAX_HEAD_LEN or not any(head.partial.fullmatch(written) for head in self._heads)
            return ""
        found = next((match for head in self._heads if (match := head.full.fullmatch(written))), None)
        if found is None:
            self.done = True
            return brace + rest
        call_id = found.groupdict().get("id", "").strip()
        is_new = call_id not in ("", *self._ids)
        self._ids.add(call_id)
        self.started, self.raw = True, ""
        self.parts.append(CallStart(self.index, found["name"], call_id if is_new else None))
        return brace + rest

    def _read_arguments(self, text: str) -> str:
        for i, char in enumerate(text):
            self._json.feed(char)
            if self._json.is_complete:
                self._is_complete = True
                self.parts.append(Arguments(self.index, text[: i + 1]))
                return text[i + 1 :]
        if text:
            self.parts.append(Arguments(self.index, text))
        return ""

    def _read_tail(self, text: str) -> str:
        self._after += text
        rest = self._after.lstrip()
        if rest.startswith(self._tail):
            self.done = True
            return rest[len(self._tail) :] if self._tail else self._after
        if self._tail.startswith(rest) and len(self._after) <= MAX_HEAD_LEN:
            return ""
        self.done = True
        return self._after


class ObjectCall(CallReader):
    """An object with a name and arguments: ``{"name": ..., "arguments": {...}}``.

    Args:
        names: names of tools; a call of another is not a call. None: any.
        needs_arguments: an object without arguments is not a call.
    """

    def __init__(self, index: int, names: Collection[str] | None = None, needs_arguments: bool = False) -> None:
        super().__init__(index)
        self._json = JsonDepth()
        self._name: str | None = None
        self._names = names
        self._needs_arguments = needs_arguments
        self._role = "key"
        self._key = ""
        self._member = ""
        self._arguments = ""  # read before the name
        self._has_arguments = False  # a second member of this meaning is ignored

    @property
    def is_cut(self) -> bool:
        in_arguments = self._role == "value" and self._key in _KEYS and self._member[:1] == "{"
        has_object = in_arguments and self._json.depth == 1 and not self._json.in_string
        return self.started and not (self.done or self._has_arguments or has_object)

    def feed(self, text: str) -> str:
        for i, char in enumerate(text):
            if not self.started:
                self.raw += char
            self._member_char(char)
            if self.done:
                return text[i + 1 :]
        return ""

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
                self.done = True
        elif self._role == "colon":
            if char == ":":
                self._role, self._member = "value", ""
            elif not char.isspace():
                self.done = True
        else:
            self._value_char(char, was_string, depth)

    def _value_char(self, char: str, was_string: bool, was_depth: int) -> None:
        if not self._member and char.isspace():
            return
        is_complete = self._member[:1] == "{" and self._member[-1:] == "}" and was_depth == 1 and not was_string
        if is_complete:  # whitespace after an object
            self.done |= not char.isspace()
            return
        self._member += char
        if self._key in _KEYS and self._member[0] == "{" and not self._has_arguments:
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
        elif self._key in _KEYS and not self._has_arguments:
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


def _string(text: str) -> str | None:
    """The value of a JSON string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
