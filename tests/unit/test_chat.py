"""The terminal chat, against a scripted server."""

import asyncio
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cluster.errors import LinkClosed
from cluster.types import Request
from deploy.chat import Run, Terminal, WordWrapper, printable
from deploy.chat_client import Conversation, ServerFailed, connect, served_model
from tests.support.api import app_of, listening, model_info, saying, token_ids, tokenizer
from tests.support.scripted import ScriptedClient, Step, spell
from tests.support.terminal import COLUMNS, on_terminal

Script = Callable[[Request], Iterable[Step]]


@contextmanager
def conversation(script: Script) -> Iterator[tuple[Conversation, ScriptedClient]]:
    cluster = ScriptedClient(model_info(), script)
    with listening(app_of(cluster)) as address, connect(f"{address}/v1", None) as client:
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
    for body in ("<html>", '{"data": []}', "5"):
        page = httpx.MockTransport(lambda request, body=body: httpx.Response(200, text=body))
        with httpx.Client(transport=page, base_url="http://a") as client, pytest.raises(ServerFailed, match="OpenAI's API"):
            served_model(client)


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31m\tb\n\x07é") == "a␛[31m\tb\n␇é"


def test_a_terminal_breaks_lines_between_words() -> None:
    """Tokens end anywhere within words, and the last word of a line comes in several pieces."""
    answer = "an answer to the other answers, word by word, " * 5
    cluster = ScriptedClient(model_info(), saying(answer.strip()))
    with listening(app_of(cluster)) as url, on_terminal("chat", "--url", url) as terminal:
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


# ---- word wrapping of an answer that comes in pieces


TEXTS = st.text(alphabet="abcdefgh   .\n\té日本🎉", max_size=120)
WIDTHS = st.integers(min_value=4, max_value=30)


def wrapped(pieces: list[tuple[str, str]], width: int) -> list[Run]:
    wrapper = WordWrapper()
    runs = [run for text, style in pieces for run in wrapper.feed(text, style, width)]
    return [*runs, *wrapper.finish(width)]


def written(text: str, width: int) -> str:
    return "".join(part for part, _ in wrapped([(text, "")], width))


def test_lines_break_between_words_wherever_the_pieces_end() -> None:
    pieces = ["The quick bro", "wn", " fox", " jumps", " over the ", "lazy dog."]
    runs = wrapped([(piece, "") for piece in pieces], 16)
    assert "".join(text for text, _ in runs) == "The quick brown\nfox jumps over\nthe lazy dog."


def test_the_lines_and_the_indentation_of_an_answer_are_kept() -> None:
    assert written("def f():\n    return 1\n\n\tdone", 20) == "def f():\n    return 1\n\n        done"


def test_a_word_longer_than_a_line_is_broken_at_the_edge() -> None:
    assert written("see abcdefghijklmnop now", 6) == "see\nabcdef\nghijkl\nmnop\nnow"


def test_lines_break_between_wide_characters() -> None:
    assert written("日本語のテキスト end", 6) == "日本語\nのテキ\nスト\nend"


@given(TEXTS, WIDTHS)
def test_no_line_is_too_long(text: str, width: int) -> None:
    assert max(map(cell_len, written(text, width).split("\n"))) <= width


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=8), max_size=20), st.integers(8, 30))
def test_no_word_that_fits_into_a_line_is_broken(words: list[str], width: int) -> None:
    assert written(" ".join(words), width).split() == words


@given(TEXTS, WIDTHS)
def test_nothing_is_lost_but_blanks(text: str, width: int) -> None:
    assert "".join(written(text, width).split()) == "".join(text.split())


@given(TEXTS, st.lists(st.integers(0, 120)), WIDTHS)
def test_pieces_change_nothing_and_each_character_keeps_its_style(text: str, cuts: list[int], width: int) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [(text[a:b], f"style-{a}") for a, b in pairwise(edges)]
    runs = wrapped(pieces, width)
    assert "".join(part for part, _ in runs) == written(text, width)
    visible = [(char, style) for part, style in runs for char in part if not char.isspace()]
    assert visible == [(char, style) for part, style in pieces for char in part if not char.isspace()]
