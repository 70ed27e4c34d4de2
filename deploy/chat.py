"""``outrider chat``: a chat in the terminal, with drafted text in colour."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from difflib import get_close_matches
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from deploy.chat_client import Conversation, ServerFailed, Summary, connect, served_model

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


HELP = """\
/reset            start a new conversation
/system TEXT      set the system message; without TEXT, remove it
/drafting NAME    auto, off, or the name of a drafter
/quit             quit (or Ctrl-D); Ctrl-C stops an answer"""
COMMANDS = ("/reset", "/system", "/drafting", "/help", "/quit")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # Unicode's category Cc, without line breaks and tabs
DRAFTER_STYLES = ("green", "cyan", "magenta", "yellow", "blue")


class Terminal:
    """Reads lines, runs commands and prints answers."""

    def __init__(self, conversation: Conversation, console: Console, read_line: Callable[[str], str]) -> None:
        self._conversation = conversation
        self._console = console
        self._read_line = read_line
        self._styles: dict[str, str] = {}  # by drafter

    def run(self) -> None:
        """Until /quit or the end of the input."""
        self._console.print(f"[bold]{self._conversation.model}[/], drafted text in colour; /help lists the commands")
        while True:
            try:
                line = self._read_line("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/reset":
                self._conversation.reset()
                self._note("new conversation")
            case "/system":
                self._conversation.system = argument or None
                self._note(f"system: {argument}" if argument else "no system message")
            case "/drafting":
                self._conversation.drafting = argument or self._conversation.drafting
                self._note(f"drafting: {self._conversation.drafting}")
            case "/help":
                self._note(HELP)
            case _:
                near = get_close_matches(name, COMMANDS, n=1)
                self._note(f"unknown command {name}; " + (f"did you mean {near[0]}?" if near else "see /help"))

    def _answer(self, line: str) -> None:
        self._conversation.last = None
        wrapper = WordWrapper()
        ended: Text | None = None
        with closing(self._conversation.ask(line)) as pieces:
            try:
                for piece in pieces:
                    self._write(wrapper.feed(printable(piece.text), self._style(piece.drafter), self._width))
            except KeyboardInterrupt:
                ended = Text("(stopped)", style="dim")
            except ServerFailed as error:
                ended = Text(str(error), style="red")
        self._write(wrapper.finish(self._width))
        self._console.print()
        if ended is not None:
            self._console.print(ended)
        elif self._conversation.last is not None:
            self._console.print(self._status_line(self._conversation.last))

    def _style(self, drafter: str | None) -> str:
        """A colour per drafter; none for the target's own tokens."""
        if drafter is None:
            return ""
        return self._styles.setdefault(drafter, DRAFTER_STYLES[len(self._styles) % len(DRAFTER_STYLES)])

    @property
    def _width(self) -> int:
        """The current width of the terminal; unlimited for a file."""
        return self._console.width if self._console.is_terminal else sys.maxsize

    def _write(self, runs: Iterator[Run]) -> None:
        for text, style in runs:
            self._console.print(Text(text, style=style), end="", soft_wrap=True)

    def _status_line(self, summary: Summary) -> Text:
        acceptance = summary.acceptance
        line = Text(
            f"{summary.num_tokens} tokens in {summary.total_s:.1f} s, first after {summary.first_token_s:.2f} s"
            f" · {acceptance['mean_accepted_len'] or 0.0:.2f} tokens a pass",
            style="dim",
        )
        for name, counts in acceptance["drafters"].items():
            accepted = f" {counts['num_accepted']} of {counts['num_proposed']} accepted"
            line.append_text(Text.assemble(" · ", (name, self._style(name)), accepted))
        if not acceptance["drafters"]:
            line.append(" · nothing was drafted")
        if summary.finish == "length":
            line.append(" · stopped at max_tokens")
        return line

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


def printable(text: str) -> str:
    """Replaces control characters: a model's output must not control the terminal."""
    return _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if match[0] < " " else "\ufffd", text)


def chat(url: str, api_key: str | None, system: str | None, drafting: str, sampling: dict[str, Any]) -> None:
    """Chats with the server at ``url`` until the user quits. Raises ServerFailed: no answer, or it refuses the key."""
    with suppress(ImportError):  # line editing and history, if available
        import readline  # noqa: F401
    with connect(url, api_key) as client:
        conversation = Conversation(client, served_model(client), system, drafting, sampling)
        Terminal(conversation, Console(highlight=False), input).run()
