"""Forms in which model families write tool calls, by name in `forms`, and the `Scanner` that most share. It finds calls in
an answer's text: text, then calls, then text again. Text that is no call is content."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from deploy.api.answer_parts import Part, Text, merged, releasable

_BLANK = " \t\r\n"


class CallReader(ABC):
    """One call while it is read. A call that is done before it has started is none, and ``raw`` is content."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.started = False
        self.done = False
        self.raw = ""  # as long as it is not started
        self.parts: list[Part] = []

    @property
    def is_cut(self) -> bool:
        """Whether its arguments are not complete."""
        return self.started and not self.done

    @abstractmethod
    def feed(self, text: str) -> str:
        """Reads on. The rest that does not belong to the call: nothing, unless it is done."""

    def end(self) -> str:
        """At the end of the answer: text that was held back and belongs neither to the arguments nor to a marker."""
        return ""


NewCall = Callable[[int], CallReader]  # of the call of this number


class Scanner:
    """Common to all forms with a marker before calls. Whitespace between calls is dropped.

    Args:
        begin: marker of calls.
        call_begin: how each call begins; it belongs to the call. "": anything is tried.
        end: marker after the calls.
        skipped: characters between calls, beside whitespace.
        is_section: several calls may follow one marker.
        other_call: reads what follows the marker and does not begin as a call; then each call may have its own marker.
    """

    def __init__(
        self,
        begin: str,
        new_call: NewCall,
        call_begin: str = "{",
        end: str = "",
        *,
        skipped: str = "",
        is_section: bool = True,
        other_call: NewCall | None = None,
    ) -> None:
        self.begin = begin
        self.is_cut = False
        self._new_call = new_call
        self._other_call = other_call
        self._call_begin = call_begin
        self._end = end
        self._skip = _BLANK + skipped
        self._is_section = is_section
        self._held = ""
        self._opening = ""  # marker and whitespace before the call, content if it is none
        self._skipped: list[str] = []  # since then, or since the last call
        self._state = "text"
        self._call: CallReader | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        call, self._call = self._call, None
        parts: list[Part] = []
        if call is not None:
            left = call.end()
            parts = merged(call.parts)
            self.is_cut = call.is_cut
            held = left if call.started else self._opening + call.raw
        elif self._state == "calls":
            held = "" if not self._opening else self._opening + self._take_skipped() + held
        elif self._num_calls and held.isspace():
            held = ""
        return [*parts, Text(held)] if held else parts

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
        self._open(self._held[len(released) : found + len(self.begin)], self._held[found + len(self.begin) :])
        return True

    def _open(self, opening: str, held: str) -> None:
        self._opening, self._held, self._state = opening, held, "calls"

    def _read_between(self, parts: list[Part]) -> bool:
        if self._other_call is not None:
            again = self._held.lstrip(self._skip.replace(self.begin[0], ""))
            if again.startswith(self.begin) and not self._opening:  # the next call
                self._take_skipped()
                self._open(self.begin, again[len(self.begin) :])
                return True
            if again and self.begin.startswith(again):
                return False
        rest = self._held.lstrip(self._skip)
        self._skipped.append(self._held[: len(self._held) - len(rest)])  # not read again with each delta
        self._held = rest
        if self._end and rest.startswith(self._end):
            if self._opening:  # nothing was called
                parts.append(Text(self._opening + self._take_skipped() + self._end))
            self._to_text(rest[len(self._end) :])
            return bool(self._held)
        if not rest or (self._end and self._end.startswith(rest)):
            return False
        if rest.startswith(self._call_begin):
            self._begin_call(self._new_call(self._num_calls))
            return True
        if self._call_begin.startswith(rest):
            return False
        if self._other_call is not None and self._opening:
            self._begin_call(self._other_call(self._num_calls))
            return True
        if before := self._opening + self._take_skipped():
            parts.append(Text(before))
        self._to_text(rest)
        return True

    def _begin_call(self, call: CallReader) -> None:
        skipped = self._take_skipped()
        self._opening += skipped if self._opening else ""
        self._call = call

    def _take_skipped(self) -> str:
        skipped = "".join(self._skipped)
        self._skipped.clear()
        return skipped

    def _read_call(self, call: CallReader, parts: list[Part]) -> bool:
        self._held = call.feed(self._held)
        parts += merged(call.parts)
        call.parts = []
        if call.done and not call.started:
            self._call = None
            parts.append(Text(self._opening + call.raw))
            self._to_text(self._held)
        elif call.done:
            self._call = None
            self._opening = ""
            self._num_calls += 1
            if not self._is_section:
                self._to_text(self._held)
        return bool(self._held)

    def _to_text(self, held: str) -> None:
        self._state, self._opening, self._held = "text", "", held
        self._skipped.clear()


class LeadingScanner(Scanner):
    """Calls stand at the begin of an answer alone.

    Args:
        first: how they begin, which belongs to the first call if ``keeps_first``.
        begin: marker that may stand before.
    """

    def __init__(
        self, begin: str, new_call: NewCall, first: str, call_begin: str, end: str, *, skipped: str, keeps_first: bool
    ) -> None:
        super().__init__(begin, new_call, call_begin, end, skipped=skipped)
        self._first = first
        self._keeps_first = keeps_first
        self._begins = True

    def _read_text(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        marked = rest.removeprefix(self.begin).lstrip() if rest.startswith(self.begin) else rest
        if not self._begins:
            if self._held and not (self._num_calls and self._held.isspace()):
                parts.append(Text(self._held))
                self._held = ""
            return False
        if marked.startswith(self._first):
            self._begins = False
            kept = marked if self._keeps_first else marked[len(self._first) :]
            self._open(self._held[: len(self._held) - len(kept)], kept)
            return True
        if not marked or (marked is rest and self.begin.startswith(rest)):
            return False
        self._begins = False
        return True


MAX_HEAD_LEN = 1024  # more is held back for no head
NAME = r"[\w.-]{1,256}"
KEY = r"[^<>\n]{1,128}"
_FIELDS = {
    "{name}": NAME,
    "{key}": KEY,
    "{is_string}": "[a-z]{1,5}",
    "{other_id}": r"\w{1,64}",
    "{id}": rf"\s*(?:functions\.)?(?P<name>{NAME})(?::\d{{1,6}})?\s*",
}
_BEGUN = {"{id}": r"[\w\s.:-]{1,274}"}  # matches all that may become a field; other fields match it themselves
_PIECES = re.compile(r"(\n|\{\w+\})")


@dataclass(frozen=True, slots=True)
class Head:
    """``full`` matches at the begin of a text; ``partial`` matches all of a text that may become one."""

    template: str
    full: re.Pattern[str]
    partial: re.Pattern[str]

    @classmethod
    def of(cls, template: str, *, before: tuple[str, ...] = ()) -> "Head":
        """Of a text with fields, such as ``<function={name}>``. A line break stands for any whitespace.

        Args:
            before: one of them must follow, and is not of the head.
        """
        full = f"(?={'|'.join(map(re.escape, before))})"
        partial = f"(?:{'|'.join(map(_beginnings, before))})"
        for piece in reversed(_PIECES.split(template)):
            if piece == "\n":
                full, partial = rf"\s*{full}", rf"\s*{partial}"
            elif piece in _FIELDS:
                full = f"(?P<{piece[1:-1]}>{_FIELDS[piece]}){full}"
                partial = f"(?:{_BEGUN.get(piece, _FIELDS[piece])}{partial})?"
            else:
                full, partial = re.escape(piece) + full, _beginnings(piece, partial)
        return cls(template, re.compile(full, re.ASCII), re.compile(partial, re.ASCII))

    def written(self, **fields: str) -> str:
        return _PIECES.sub(lambda found: fields.get(found[0][1:-1], found[0]), self.template)


def _beginnings(literal: str, then: str = "") -> str:
    """A pattern of every beginning of ``literal``, the empty one included, and of ``literal`` with what ``then`` matches."""
    pattern = then
    for char in reversed(literal):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern
