"""Callers that hang up or do not read, answers that take too long: the engine's work ends."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from cluster.types import Request
from deploy.api.chat_template import ChatTemplate
from deploy.api.tokenizer import Tokenizer
from tests.support.api import (
    CHAT_TEMPLATE,
    app_of,
    chat_body,
    client_of,
    completion_body,
    events,
    fast_tokenizer,
    finishing,
    model_info,
    saying,
    serving,
    token_ids,
    tokenizer,
)
from tests.support.asgi import CHAT, Caller, answering
from tests.support.scripted import ScriptedClient, Step, spell


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_hangs_up_ends_the_work_at_once(stream: bool) -> None:
    started, never = asyncio.Event(), asyncio.Event()

    def script(request: Request) -> Iterable[Step]:
        yield from spell(request, token_ids("the answer")[:2])
        started.set()
        yield never

    caller = Caller(script)
    call = caller.start(chat_body(stream=stream, n=2))
    await started.wait()
    if stream:
        await caller.got_body.wait()
    caller.put(type="http.disconnect")
    await call
    assert len(caller.cluster.requests) == 2
    assert sorted(caller.cluster.aborted) == sorted(request.id for request in caller.cluster.requests)
    assert caller.cluster.num_open == 0


async def test_a_cancelled_call_ends_the_work_too() -> None:
    never = asyncio.Event()
    caller = Caller(answering(never))
    call = caller.start(chat_body(stream=True))
    await caller.got_body.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert caller.cluster.num_open == 0


async def test_a_caller_that_hangs_up_in_the_queue_leaves_it() -> None:
    release = asyncio.Event()

    def script(request: Request) -> list[Step]:
        return [release, *finishing(request, token_ids("the answer"))]

    caller = Caller(script, max_concurrent=1, max_sequences=1, max_n=1)
    first = caller.start(chat_body())
    await caller.cluster.asked(1)
    second = Caller(app=caller.app)
    waiting = second.start(chat_body())
    second.put(type="http.disconnect")
    await waiting
    assert second.sent == []
    release.set()
    caller.put(type="http.request", body=b"", more_body=False)
    await first
    assert caller.status == 200
    assert len(caller.cluster.requests) == 1


# ---- deadlines


async def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async with serving(answering(asyncio.Event()), request_timeout_s=0.05) as (http, cluster):
        response = await http.post(CHAT, json=chat_body())
        assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")
        assert len(cluster.aborted) == 1


async def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    # The deadline counts from the request's arrival: a busy machine must open the stream before it.
    async with serving(answering(asyncio.Event()), request_timeout_s=1.0) as (http, cluster):
        response = await http.post(CHAT, json=chat_body(stream=True))
        assert response.status_code == 200
        *_, last, _ = events(response.text)
        assert json.loads(last)["error"]["code"] == "timeout"
        assert len(cluster.aborted) == 1


async def test_a_caller_that_does_not_read_is_not_waited_for() -> None:
    # A busy machine has begun the stream by then.
    caller = Caller(answering(asyncio.Event()), request_timeout_s=0.5, send_error_timeout_s=0.02)
    caller.reads = False
    await caller.start(chat_body(stream=True))
    assert caller.cluster.num_open == 0
    assert len(caller.cluster.aborted) == 1


async def test_a_caller_that_does_not_read_a_whole_answer_holds_nobody_up() -> None:
    caller = Caller(body_timeout_s=0.05, max_concurrent=1, max_sequences=1, max_n=1)
    caller.reads = False
    call = caller.start(chat_body())
    await caller.cluster.asked(1)
    other = Caller(app=caller.app)
    await other.start(chat_body())
    assert other.status == 200
    await call


async def test_a_stream_that_is_generated_gives_its_turn_away_however_slowly_it_is_read() -> None:
    reader = Caller(max_concurrent=1, max_sequences=1, max_n=1)
    reader.reads = False
    slow = reader.start(chat_body(stream=True))
    await reader.got_body.wait()
    other = Caller(app=reader.app)
    await other.start(chat_body())
    assert other.status == 200
    assert not slow.done()
    reader.put(type="http.disconnect")
    await slow
    assert reader.cluster.num_open == 0


async def test_a_reader_of_a_stream_that_takes_nothing_is_taken_for_gone() -> None:
    caller = Caller(answering(asyncio.Event()), stall_timeout_s=0.02)
    caller.reads = False
    await caller.start(chat_body(stream=True))
    assert len(caller.cluster.aborted) == 1


@pytest.mark.parametrize("body", [chat_body(model="none"), None])
async def test_a_reader_that_takes_no_error_is_taken_for_gone(body: dict[str, Any] | None) -> None:
    caller = Caller(body_timeout_s=0.02, stall_timeout_s=0.02)
    caller.reads = False
    await caller.start(body)
    assert caller.status == (408 if body is None else 404)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_reader_that_takes_no_end_of_a_stream_is_taken_for_gone(include_usage: bool) -> None:
    caller = Caller(request_timeout_s=2.0, stall_timeout_s=0.02)
    caller.stalls_at = b"data: [DONE]"
    await caller.start(chat_body(stream=True, stream_options={"include_usage": include_usage}))
    assert caller.body.endswith("data: [DONE]\n\n"), "the reader was waited for until the deadline of the call"


class _HeldFast:
    """A fast tokenizer that calls ``hold`` before it encodes a long text."""

    def __init__(self, fast: FastTokenizer, hold: Callable[[], None]) -> None:
        self._fast, self._hold = fast, hold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def encode_batch(self, *arguments: Any, **named: Any) -> Any:
        self._hold()
        return self._fast.encode_batch(*arguments, **named)


class HeldTokenizer(Tokenizer):
    """Encodes and decodes long inputs once ``release`` is set; ``started`` tells that it was asked to."""

    def __init__(self) -> None:
        self.started, self.release = threading.Event(), threading.Event()
        self.on_loop: list[bool] = []
        self._loop_thread = threading.get_ident()
        super().__init__(_HeldFast(fast_tokenizer(), self._hold), ChatTemplate(CHAT_TEMPLATE, {}))  # type: ignore[arg-type]

    def _hold(self) -> None:
        self.on_loop.append(threading.get_ident() == self._loop_thread)
        self.started.set()
        if not self.on_loop[-1]:
            self.release.wait()

    def text_of(self, token_ids: Sequence[int]) -> str:
        self._hold()
        return super().text_of(token_ids)


TOKENIZING: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "a" * 3000}),
    ("/detokenize", {"tokens": [5] * 3000}),
    (CHAT, chat_body(messages=[{"role": "user", "content": "a" * 3000}])),
    ("/v1/completions", completion_body(prompt="a" * 3000)),
]


@pytest.mark.parametrize(("path", "body"), TOKENIZING)
@pytest.mark.parametrize("hangs_up", [False, True])
async def test_tokenizing_ends_at_the_deadline_and_when_the_caller_hangs_up(
    path: str, body: dict[str, Any], hangs_up: bool
) -> None:
    words = HeldTokenizer()
    cluster = ScriptedClient(model_info(), saying(""))
    caller = Caller(app=app_of(cluster, words, request_timeout_s=300.0 if hangs_up else 0.05))
    call = caller.start(body, path)
    try:
        assert await asyncio.to_thread(words.started.wait, 60.0)
        if hangs_up:
            caller.put(type="http.disconnect")
        await call
    finally:
        words.release.set()
    assert words.on_loop == [False]
    if hangs_up:
        assert caller.sent == []
    else:
        assert (caller.status, json.loads(caller.body)["error"]["code"]) == (504, "timeout")


async def test_many_tokens_are_spelled_in_a_thread() -> None:
    spelled_on = []

    class Spelling(HeldTokenizer):
        def token_strs(self, token_ids: Sequence[int]) -> list[str]:
            spelled_on.append(threading.get_ident() == self._loop_thread)
            return super().token_strs(token_ids)

    words = Spelling()
    words.release.set()
    async with client_of(app_of(ScriptedClient(model_info(), saying("")), words)) as http:
        for num_words in (1, 10_000):
            body = {"prompt": "the answer " * num_words, "return_token_strs": True}
            answer = (await http.post("/tokenize", json=body)).json()
            assert tuple(answer["tokens"]) == token_ids(body["prompt"])
            assert answer["count"] == len(answer["tokens"]) > num_words
            assert answer["token_strs"] == tokenizer().token_strs(answer["tokens"])
            text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
            assert text == {"prompt": body["prompt"]}
    assert spelled_on == [True, False]
