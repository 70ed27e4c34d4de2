"""What stands before arguments or a value, as a pattern of which every beginning is recognised."""

import re
from dataclasses import dataclass

MAX_HEAD_LEN = 1024  # more is held back for no head
NAME = r"[\w.-]{1,256}"


@dataclass(frozen=True, slots=True)
class Head:
    """``full`` matches at the begin of a text; ``partial`` matches all of a text that may become one."""

    full: re.Pattern[str]
    partial: re.Pattern[str]

    @classmethod
    def of(cls, *pieces: str | tuple[str, str]) -> "Head":
        """Of literal strings, and of named patterns any beginning of which matches the pattern, too, or is empty."""
        full, partial = "", ""
        for piece in pieces:
            full += re.escape(piece) if isinstance(piece, str) else f"(?P<{piece[0]}>{piece[1]})"
        for piece in reversed(pieces):
            partial = beginnings(piece, partial) if isinstance(piece, str) else f"(?:{piece[1]}{partial})?"
        return cls(re.compile(full, re.ASCII), re.compile(partial, re.ASCII))


def beginnings(literal: str, then: str = "") -> str:
    """A pattern of every beginning of ``literal``, the empty one included, and of ``literal`` with what ``then`` matches."""
    pattern = then
    for char in reversed(literal):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern
