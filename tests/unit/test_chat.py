"""The terminal chat, against a scripted server."""

import asyncio
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from rich.console import Console

from cluster.errors import LinkClosed
from cluster.types import Request
from deploy.chat import Terminal, printable
from deploy.chat_client import Conversation, ServerFailed, connect, served_model
from tests.support.api import app_of, listening, model_info, saying, token_ids, tokenizer
from tests.support.scripted import ScriptedClient, Step, spell
from tests.support.terminal import COLUMNS, on_terminal

Script = Callable[[Request], Iterable[Step]]


@contextmanager
def conversation(script: Script) -> Iterator[tuple[Conversation, ScriptedClient]]:
    cluster = ScriptedClient(model_info(), script)
    with (
        listening(app_of(cluster)) as address,
        connect(f"{address}/v1", None) as client,
    ):
        yield Conversation(client, served_model(client)), cluster


def typed(*lines: str) -> Callable[[str], str]:
    rest = iter(lines)

    def read_line(prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    return read_line


def shown(talk: Conversation, *lines: str, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=color, color_system="standard" if color else None, width=200, highlight=False)
    Terminal(talk, console, typed(*lines)).run()
    return out.getvalue()


def test_an_answer_is_shown_with_its_acceptance() -> None:
    with conversation(saying("the answer is 42")) as (talk, cluster):
        text = shown(talk, "what is it?")
        assert "the answer is 42\n" in text
        assert talk.last is not None
        assert f"{talk.last.num_tokens} tokens in" in text
        assert "ngram" in text.splitlines()[-2]
        assert talk.turns == [
            {"role": "user", "content": "what is it?"},
            {"role": "assistant", "content": "the answer is 42"},
        ]
        assert len(cluster.requests) == 1


def test_drafted_words_have_a_colour_and_the_target_s_own_have_none() -> None:
    with conversation(saying("the answer", num_per_round=2)) as (talk, _):
        coloured = shown(talk, "what?", color=True)
        pieces = list(talk.ask("again?"))
    drafted = [piece.text for piece in pieces if piece.drafter is not None]
    own = [piece.text for piece in pieces if piece.drafter is None]
    assert drafted
    assert own
    answer = coloured[coloured.index("lists the commands") :]
    green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", answer))
    assert green.removesuffix("ngram") == "".join(drafted)  # the drafter's name in the last line is in its colour


def test_without_drafts_it_says_so() -> None:
    with conversation(saying("the answer", drafter=None)) as (talk, _):
        assert "nothing was drafted" in shown(talk, "/drafting off", "what?")


def test_commands() -> None:
    with conversation(saying("the answer")) as (talk, cluster):
        text = shown(
            talk, "/system be brief", "/drafting ngram", "one", "/reset", "/system", "two", "/rest", "/quit", "three"
        )
        assert "did you mean /reset?" in text
        first, second = cluster.requests
        assert first.chain == ("ngram",)
        prompts = [tokenizer().decode(request.prompt_token_ids) for request in (first, second)]
        assert prompts[0].startswith("system\nbe brief")
        assert prompts[1].startswith("user\ntwo")


def test_a_refusal_is_shown_and_the_chat_goes_on() -> None:
    with conversation(saying("the answer")) as (talk, _):
        text = shown(talk, "/drafting nobody", "one", "/drafting auto", "two")
        assert "'nobody' is not a drafter of this server" in text
        assert [turn["content"] for turn in talk.turns] == ["two", "the answer"]


def test_an_answer_that_breaks_off_is_kept_as_far_as_it_came() -> None:
    beyond = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []  # the server's, which has a thread of its own

    def script(request: Request) -> Iterable[Step]:
        loops.append(asyncio.get_running_loop())
        yield from spell(request, token_ids("the answer")[:2])
        yield beyond
        yield LinkClosed("the target went")

    with conversation(script) as (talk, _):
        pieces = talk.ask("what?")
        first = next(pieces)
        loops[0].call_soon_threadsafe(beyond.set)
        with pytest.raises(ServerFailed, match="the target went"):
            list(pieces)
        assert talk.turns[-1]["content"].startswith(first.text)


def test_an_answer_that_is_ended_is_kept_and_its_work_stops() -> None:
    never = asyncio.Event()

    def script(request: Request) -> Iterable[Step]:
        yield from spell(request, token_ids("the answer")[:2])
        yield never

    with conversation(script) as (talk, cluster):
        pieces = talk.ask("what?")
        next(pieces)
        pieces.close()
        assert talk.turns[-1]["role"] == "assistant"
    assert cluster.aborted == [cluster.requests[0].id]


def test_no_server_is_one_clear_line() -> None:
    with connect("http://127.0.0.1:9", None) as client, pytest.raises(ServerFailed, match="outrider serve"):
        served_model(client)


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31m\tb\n\x07é") == "a␛[31m\tb\n␇é"


def test_a_terminal_breaks_lines_between_words() -> None:
    """Tokens end anywhere within words, and the last word of a line comes in several pieces."""
    answer = "an answer to the other answers, word by word, " * 5
    cluster = ScriptedClient(model_info(), saying(answer.strip()))
    with (
        listening(app_of(cluster)) as url,
        on_terminal("chat", "--url", url) as terminal,
    ):
        terminal.await_text("> ")
        terminal.type("what is it?\n")
        terminal.await_text("accepted")
        terminal.type("/quit\n")
        assert terminal.wait_end() == 0
    lines = terminal.text.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    first = lines.index(next(line for line in lines if line.startswith("an answer")))
    shown_answer = lines[first : first + 3]
    assert " ".join(shown_answer).split() == answer.split()
    assert all(len(line) + len(following.split()[0]) >= COLUMNS for line, following in pairwise(shown_answer))


def test_a_file_gets_lines_of_any_length() -> None:
    answer = "an answer to the other answers, word by word, " * 5
    with conversation(saying(answer)) as (talk, _):
        out = io.StringIO()
        Terminal(talk, Console(file=out, width=80), typed("what is it?")).run()
        assert answer.strip() in out.getvalue()
