"""Limits on the size and the speed of request bodies."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any

import pytest
from fastapi import Request
from pydantic import AfterValidator, BaseModel, ValidationError

from deploy.api.anthropic import MessagesRequest
from deploy.api.body import AT_ONCE_BYTES, MAX_FAULTS, BodyReader, Strict, parse_body
from deploy.api.errors import ApiError, ClientGone
from deploy.api.messages import MAX_PARTS
from deploy.api.responses import ResponsesRequest
from deploy.api.schema import MAX_PROMPTS, ChatRequest, CompletionRequest, DetokenizeRequest
from deploy.api.settings import ApiSettings
from deploy.api.tasks import ThreadShares
from deploy.api.tenants import NOBODY
from tests.support.api import chat_body, completion_body, serving
from tests.support.asgi import CHAT, Caller


@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_refused_while_it_is_read(declared: bool) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1_000_000:
            sent += 1000
            yield b" " * 1000

    async with serving(max_request_bytes=5000) as (http, cluster):
        content: Any = b" " * 6000 if declared else endless()
        response = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["param"] == "body"
        assert response.headers["connection"] == "close"
        assert sent < 1_000_000
        assert (await http.post(CHAT, json=chat_body())).status_code == 200
        assert len(cluster.requests) == 1


async def test_bodies_may_not_fill_the_memory_together() -> None:
    settings = {"max_request_bytes": 4000, "max_held_bytes": 5000}
    first = Caller(**settings)
    call = first.start(None)
    first.put(type="http.request", body=b" " * 3000, more_body=True)
    await asyncio.sleep(0)
    second = Caller(app=first.app)
    second.put(type="http.request", body=b" " * 3000, more_body=True)
    await second.start(None)
    assert second.status == 429
    assert dict(second.sent[0]["headers"])[b"retry-after"] == b"1"
    first.put(type="http.request", body=b"", more_body=False)
    await call
    assert first.status == 400
    third = Caller(app=first.app)
    await third.start(chat_body())
    assert third.status == 200


async def test_a_slow_body_is_given_up() -> None:
    caller = Caller(body_timeout_s=0.02)
    await caller.start(None)
    assert caller.status == 408
    assert json.loads(caller.body)["error"]["param"] == "body"


async def test_a_caller_that_hangs_up_amid_its_body_gets_nothing() -> None:
    caller = Caller()
    call = caller.start(None)
    caller.put(type="http.disconnect")
    await call
    assert caller.sent == []


class Prompted(Strict):
    prompt: str


async def test_a_large_body_is_parsed_beside_the_event_loop_and_without_collections() -> None:
    has_turned, collects, loop = threading.Event(), list[bool](), asyncio.get_running_loop()

    def check(text: str) -> str:
        collects.append(gc.isenabled())
        if len(text) > AT_ONCE_BYTES:
            loop.call_soon_threadsafe(has_turned.set)
            assert has_turned.wait(60.0), "the event loop stands still"
        return text

    class Body(Prompted):
        prompt: Annotated[str, AfterValidator(check)]

    await _read(Body, 10)
    assert len((await _read(Body, AT_ONCE_BYTES + 1)).prompt) == AT_ONCE_BYTES + 1
    assert collects == [True, False]
    assert gc.isenabled()


def _read(
    model: type[Prompted], num_chars: int, threads: ThreadShares | None = None, *, leaves: bool = False, **settings: Any
) -> Coroutine[Any, Any, Prompted]:
    """``leaves``: the client disconnects when it has sent all."""
    messages = [{"type": "http.disconnect"}] if leaves else []
    messages.append({"type": "http.request", "body": json.dumps({"prompt": "a" * num_chars}).encode(), "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    return BodyReader(ApiSettings(**settings), threads or ThreadShares()).read(request, model)


async def test_a_large_body_waits_for_its_tenants_share_of_threads_while_there_is_time_and_a_client() -> None:
    threads, release = ThreadShares(1), asyncio.Event()
    threads.is_shared = True
    other = asyncio.create_task(threads.run(NOBODY.name, release.wait))
    await asyncio.sleep(0)
    num_chars = AT_ONCE_BYTES + 1
    with pytest.raises(ApiError, match=r"within 0\.02 seconds"):
        await _read(Prompted, num_chars, threads, body_timeout_s=0.02)
    with pytest.raises(ClientGone):
        await _read(Prompted, num_chars, threads, leaves=True)
    waiting = asyncio.create_task(_read(Prompted, num_chars, threads))
    assert (await _read(Prompted, 10, threads)).prompt == "a" * 10
    assert not waiting.done()
    release.set()
    assert len((await waiting).prompt) == num_chars
    assert await other


MANY = 4 * MAX_PARTS


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, completion_body(prompt=[1, *[""] * MANY])),
        (CompletionRequest, completion_body(prompt=["", *[1] * MANY])),
        (CompletionRequest, completion_body(prompt=[[1, *[""] * MANY]])),
        (CompletionRequest, completion_body(prompt=[[""]] * MANY)),
        (CompletionRequest, completion_body(prompt=[[]] * (MAX_PROMPTS + 1))),
        (CompletionRequest, completion_body(prompt=["a"] * (MAX_PROMPTS + 1))),
        (DetokenizeRequest, {"tokens": [""] * MANY}),
        (ChatRequest, chat_body(messages=[_user([{}] * MAX_PARTS)])),
        (ChatRequest, chat_body(messages=[_user([{"type": "text", "text": ""}] * (MAX_PARTS + 1))])),
        (ChatRequest, chat_body(messages=[{"role": "assistant", "tool_calls": [{}] * 128}])),
        (ResponsesRequest, {"model": "m", "input": [_user([{}] * MAX_PARTS)]}),
        (ResponsesRequest, {"model": "m", "input": [_user([{"type": "text", "text": ""}] * (MAX_PARTS + 1))]}),
        (MessagesRequest, chat_body(max_tokens=1, messages=[_user([{}] * MAX_PARTS)])),
        (MessagesRequest, chat_body(max_tokens=1, messages=[_user([{"type": "text", "text": ""}] * (MAX_PARTS + 1))])),
        (MessagesRequest, chat_body(max_tokens=1, system=[{}] * MAX_PARTS)),
    ],
)
def test_a_long_list_of_faults_makes_few_errors(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() <= 4


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", ["body", "message", "metadata"])
def test_more_faults_than_a_body_may_have_are_not_listed(strict: bool, place: str) -> None:
    def body(count: int) -> bytes:
        fields = dict.fromkeys(map(str, range(count)), 1)
        if place == "body":
            return json.dumps(chat_body(**fields)).encode()
        return json.dumps(
            chat_body(metadata=fields) if place == "metadata" else chat_body(messages=[_user("a") | fields])
        ).encode()

    with pytest.raises(ApiError, match=f"^body: has more than {MAX_FAULTS} unknown or invalid fields$"):
        parse_body(body(MAX_FAULTS + 1), ChatRequest, strict=strict)
    if not strict and place != "metadata":  # the control
        assert len(parse_body(body(MAX_FAULTS), ChatRequest, strict=strict)[1]) == MAX_FAULTS
