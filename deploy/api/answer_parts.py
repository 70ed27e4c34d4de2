"""Splits an answer's text into content, reasoning and tool calls, as the text arrives.

The parts do not depend on how the text is split: text that may begin a marker is held back until it is decided.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Content of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Tool call ``index`` of the answer begins."""

    index: int
    name: str
    id: str | None = None  # as the model writes it


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments' JSON text of tool call ``index``."""

    index: int
    text: str


Part = Text | Reasoning | CallStart | Arguments
Opening = Literal["answer", "reasoning", "either"]  # what an answer begins with


class PartParser(Protocol):
    @property
    def is_cut(self) -> bool:
        """After the end: whether that was amid the arguments of a call."""

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """What was held back, at the end of the answer."""


class ReasoningParser(PartParser, Protocol):
    """A parser of whole answers."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""


class PlainText:
    """A parser for answers without tool calls."""

    is_cut = False

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def end(self) -> list[Part]:
        return []


class AnswerParser:
    """Reasoning first, then what ``tools`` finds in the rest. Whitespace around reasoning is dropped.

    Args:
        markers: the beginning and the end of reasoning; None: no reasoning is looked for.
        is_open: the prompt opened the reasoning, so that the answer begins in it.
    """

    def __init__(self, tools: PartParser, markers: tuple[str, str] | None, *, is_open: bool = False) -> None:
        self._tools = tools
        self._begin, self._end = markers or ("", "")
        self._state = "content" if markers is None else "reasoning" if is_open else "start"
        self._held = ""
        self._is_blank = True  # nothing but whitespace so far, in this state
        self._after_reasoning = False

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended amid the arguments of a call."""
        return self._tools.is_cut

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self._state == "start":
            started = self._held.lstrip()
            if started.startswith(self._begin):
                self._state, self._held = "reasoning", started[len(self._begin) :]
            elif not self._begin.startswith(started):
                self._state = "content"
        if self._state == "reasoning":
            found = self._held.find(self._end)
            released = self._held[:found].rstrip() if found >= 0 else releasable(self._held, self._end)
            self._held = self._held[found + len(self._end) :] if found >= 0 else self._held[len(released) :]
            if self._is_blank:
                released = released.lstrip()
            if released:
                self._is_blank = False
                parts.append(Reasoning(released))
            if found >= 0:
                self._state, self._is_blank, self._after_reasoning = "content", True, True
        if self._state == "content":
            rest, self._held = self._held, ""
            if self._after_reasoning and self._is_blank:
                rest = rest.lstrip()
                self._is_blank = not rest
            parts += self._tools.feed(rest)
        return parts

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "reasoning":
            held = held.lstrip() if self._is_blank else held
            return [Reasoning(held)] if held else []
        return [*self._tools.feed(held), *self._tools.end()]


def whole_characters(text: str) -> str:
    """Models escape halves of surrogate pairs, which UTF-8 cannot write: each becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def num_begun(text: str, marker: str) -> int:
    """Characters of the longest end of ``text`` that may begin ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def releasable(text: str, marker: str) -> str:
    """``text`` without what may begin ``marker``, and without the whitespace before that."""
    return text[: len(text) - num_begun(text, marker)].rstrip()


def merged(parts: Iterable[Part]) -> list[Part]:
    """Adjacent parts of one kind as one."""
    joined: list[Part] = []
    for _, run in groupby(parts, lambda part: (type(part), getattr(part, "index", 0))):
        first, *others = run
        if others and not isinstance(first, CallStart):
            first = replace(
                first, text=first.text + "".join(other.text for other in others if not isinstance(other, CallStart))
            )
        joined.append(first)
    return joined
