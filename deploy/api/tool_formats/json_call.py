"""Calls whose arguments are JSON, which is passed on as it arrives."""

import json
import re
from collections.abc import Collection, Sequence

from deploy.api.answer_parts import Arguments, CallStart, whole_characters
from deploy.api.tool_formats import MAX_HEAD_LEN, CallReader, Head

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
    """``{"name": ..., "arguments": {...}}``. Arguments are passed on as they arrive, if only the name and other scalars
    stand before them.

    Args:
        names: names of tools; a call of another is not a call. None: any.
        needs_arguments: an object without arguments is not a call.
    """

    def __init__(self, index: int, names: Collection[str] | None = None, needs_arguments: bool = False) -> None:
        super().__init__(index)
        self._json = JsonDepth()
        self._names = names
        self._needs_arguments = needs_arguments
        self._in_arguments = False  # those that are passed on

    @property
    def is_cut(self) -> bool:
        return self._in_arguments

    def feed(self, text: str) -> str:
        for i, char in enumerate(text):
            was_string = self._json.in_string
            self._json.feed(char)
            if not self.started and char == "{" and self._json.depth == 2 and not was_string:
                self._in_arguments = self._starts(_name_before_arguments(self.raw))
            if self._in_arguments:
                self.parts.append(Arguments(self.index, char))
                self._in_arguments = self._json.depth > 1
            if not self.started:
                self.raw += char
            if self._json.is_complete and not self.started:
                self._read_whole()
            self.done = self._json.is_complete or (not self.started and not _MAY_BE_OBJECT.match(self.raw))
            if self.done:
                return text[i + 1 :]
        return ""

    def _starts(self, name: str | None) -> bool:
        if not name or (self._names is not None and name not in self._names):
            return False
        self.started, self.raw = True, ""
        self.parts.append(CallStart(self.index, name))
        return True

    def _read_whole(self) -> None:
        members = _members(self.raw)
        arguments = next((value for key, value in members if key in _KEYS), None)
        if arguments is None and self._needs_arguments:
            return
        if self._starts(next((_string(value) for key, value in members if key == "name"), None)):
            text = _string(arguments or "") or arguments  # some models write them as a string
            self.parts.append(Arguments(self.index, "{}" if text in (None, '""', "null") else text))


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)  # numbers of any size
_MARK = re.compile(r"\s*([{},:])\s*")
_MAY_BE_OBJECT = re.compile(r'\{\s*(?:["}]|$)')
_STRING = r'"(?:[^"\\]|\\.)*"'
_BEFORE_ARGUMENTS = re.compile(
    rf'((?:\{{|,)\s*{_STRING}\s*:\s*(?:{_STRING}|[\w.+-]+)\s*)+,\s*"(?:{"|".join(_KEYS)})"\s*:\s*'
)


def _name_before_arguments(text: str) -> str | None:
    """The name in an object whose arguments come next."""
    if len(text) > MAX_HEAD_LEN or not _BEFORE_ARGUMENTS.fullmatch(text):
        return None
    members = _members(f"{text[: text.rindex(',')]}}}")
    is_first = not any(key in _KEYS for key, _ in members)
    return next((_string(value) for key, value in members if key == "name" and is_first), None)


def _members(text: str) -> list[tuple[str, str]]:
    """The members of a JSON object, each with the text of its value; none if it is not one."""
    pieces, marks, at = list[str](), "", 0
    try:
        while (mark := _MARK.match(text, at)) and mark[1] != "}":
            _, at = _DECODER.raw_decode(text, mark.end())
            pieces.append(text[mark.end() : at])
            marks += mark[1]
    except (ValueError, RecursionError):
        return []
    is_object = mark is not None and re.fullmatch(r"{:(,:)*", marks)
    return [(_string(key) or "", value) for key, value in zip(pieces[::2], pieces[1::2], strict=True)] if is_object else []


def _string(text: str) -> str | None:
    """The value of a JSON string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return whole_characters(value) if isinstance(value, str) else None
