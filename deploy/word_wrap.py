"""Word wrapping of styled text that arrives in pieces, which may split words."""

import re
from collections.abc import Iterator

from rich.cells import cell_len

TAB_CELLS = 8

Run = tuple[str, str]  # text and its style

_TOKEN = re.compile(r"\n|[ \t]+|[^ \t\n]")


class WordWrapper:
    """Breaks lines at blanks, which are dropped, and around wide characters (Chinese, Japanese, emoji).

    A word is held back until it ends, to know whether it fits. A word longer than a line is broken at the edge.
    """

    def __init__(self) -> None:
        self._column = 0  # cells written in the current line
        self._blanks: list[Run] = []  # held back after the line's text; a break replaces them
        self._word: list[Run] = []  # held back after the blanks

    def feed(self, text: str, style: str, width: int) -> Iterator[Run]:
        """Yields the text to write now; no line is longer than ``width`` cells."""
        for token in _TOKEN.findall(text):
            is_blank, is_wide = token[0] in " \t", cell_len(token) > 1
            if is_blank or is_wide or token == "\n":
                yield from self._end_word(width)
            if token == "\n":
                self._begin_line()
                yield token, ""
            elif is_blank:
                start = self._column + _cells(self._blanks)
                self._blanks.append(((" " * start + token).expandtabs(TAB_CELLS)[start:], style))
            else:
                _append(self._word, token, style)
                if is_wide or _cells(self._word) >= width:
                    yield from self._end_word(width)

    def finish(self, width: int) -> Iterator[Run]:
        """Yields the last word; the next text begins a new line."""
        yield from self._end_word(width)
        self._begin_line()

    def _begin_line(self) -> None:
        self._column = 0
        self._blanks.clear()

    def _end_word(self, width: int) -> Iterator[Run]:
        if not self._word:
            return
        if self._column + _cells(self._blanks) + _cells(self._word) > width:
            if self._column > 0:
                yield "\n", ""
            self._begin_line()
        runs: list[Run] = []
        for text, style in self._blanks + self._word:
            for char in text:
                if self._column + cell_len(char) > width and self._column > 0:
                    runs.append(("\n", ""))
                    self._column = 0
                _append(runs, char, style)
                self._column += cell_len(char)
        self._blanks.clear()
        self._word.clear()
        yield from runs


def _append(runs: list[Run], text: str, style: str) -> None:
    if runs and runs[-1][1] == style and runs[-1][0] != "\n":
        runs[-1] = (runs[-1][0] + text, style)
    else:
        runs.append((text, style))


def _cells(runs: list[Run]) -> int:
    return sum(cell_len(text) for text, _ in runs)
