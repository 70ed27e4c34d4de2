"""What stands before arguments or a value, as a pattern of which every beginning is recognised."""

import re
from dataclasses import dataclass

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
