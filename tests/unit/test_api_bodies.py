"""Limits on the size and the speed of request bodies."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.api import (
    chat_body,
    serving,
)
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
