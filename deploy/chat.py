"""``outrider chat``: a chat in the terminal, with drafted text in colour."""

import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from difflib import get_close_matches

from rich.console import Console
from rich.text import Text

from deploy.chat_client import ChatFailed, Conversation, Summary, connect, served_model
from deploy.word_wrap import Run, WordWrapper

HELP = """\
/reset            start a new conversation
/system TEXT      set the system message; without TEXT, remove it
/drafting NAME    auto, off, or the name of a drafter
/quit             quit (or Ctrl-D); Ctrl-C stops an answer"""
COMMANDS = ("/reset", "/system", "/drafting", "/help", "/quit")
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
            except ChatFailed as error:
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
        line = Text(style="dim")
        line.append(f"{summary.num_tokens} tokens in {summary.total_s:.1f} s, first after {summary.first_token_s:.2f} s")
        line.append(f" · {acceptance['mean_accepted_len'] or 0.0:.2f} tokens a pass")
        for name, counts in acceptance["drafters"].items():
            line.append(" · ")
            line.append(name, style=self._style(name))
            line.append(f" {counts['num_accepted']} of {counts['num_proposed']} accepted")
        if not acceptance["drafters"]:
            line.append(" · nothing was drafted")
        if summary.finish == "length":
            line.append(" · stopped at max_tokens")
        return line

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


def printable(text: str) -> str:
    """Replaces control characters: a model's output must not control the terminal."""
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) != "Cc":
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else "\ufffd"


def chat(
    url: str = "http://127.0.0.1:8000",
    *,
    api_key: str | None = None,
    system: str | None = None,
    drafting: str = "auto",
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> None:
    """Chats with the server at ``url`` until the user quits.

    Raises:
        ChatFailed: the server does not answer, or refuses the key.
    """
    given = {"max_completion_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    with suppress(ImportError):  # line editing and history, if available
        import readline  # noqa: F401
    with connect(url, api_key) as client:
        conversation = Conversation(client, served_model(client), system, drafting, sampling)
        console = Console(highlight=False)
        Terminal(conversation, console, input).run()
