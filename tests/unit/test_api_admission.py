"""How many calls run, how many wait, and which are refused."""

import asyncio
import json

import httpx
import pytest

from cluster.types import Request
from deploy.api.admission import Admission
from deploy.api.errors import ApiError
from deploy.api.settings import SPARE_CALLS, ApiSettings
from tests.support.api import (
    chat_body,
    finishing,
    serving,
    token_ids,
)
from tests.support.asgi import CHAT, Caller
from tests.support.scripted import Step


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize"])
async def test_calls_beyond_those_that_run_and_wait_are_refused_before_their_bodies_are_read(path: str) -> None:
    limits = {"max_concurrent": 2, "max_queued": 3, "max_sequences": 2, "max_n": 2}
    caller = Caller(**limits)
    callers = [Caller(app=caller.app) for _ in range(2 + 3 + SPARE_CALLS)]
    calls = [caller.start(None, path) for caller in callers]  # their bodies never come
    await asyncio.sleep(0)
    refused = Caller(app=caller.app)
    await refused.start(None, path)
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "overloaded")
    assert dict(refused.sent[0]["headers"])[b"retry-after"] == b"1"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(caller.app), base_url="http://api") as http:
        assert (await http.get("/health")).status_code == 200
    callers[0].put(type="http.disconnect")
    await calls[0]
    served = Caller(app=caller.app)
    await served.start(chat_body())
    assert served.status == 200
    for one in callers[1:]:
        one.put(type="http.disconnect")
    await asyncio.gather(*calls)


async def test_calls_wait_their_turn_and_further_ones_are_refused() -> None:
    release = asyncio.Event()

    def script(request: Request) -> list[Step]:
        return [release, *finishing(request, token_ids("the answer"))]

    async with serving(script, max_concurrent=2, max_queued=1, max_sequences=2, max_n=2, retry_after_s=2.5) as (
        http,
        cluster,
    ):
        running = [asyncio.create_task(http.post(CHAT, json=chat_body())) for _ in range(2)]
        await cluster.asked(2)
        waiting = asyncio.create_task(http.post(CHAT, json=chat_body(n=2)))
        while "outrider_requests_queued 1.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110 - seen from outside
            await asyncio.sleep(0)
        refused = await http.post(CHAT, json=chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "3"
        assert len(cluster.requests) == 2
        release.set()
        answers = await asyncio.gather(*running, waiting)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert len(cluster.requests) == 4


async def test_admission_is_fair_and_forgets_nobody() -> None:
    admission = Admission(ApiSettings(max_concurrent=3, max_sequences=3, max_n=3, max_queued=4))
    order: list[str] = []
    leave = {name: asyncio.Event() for name in "abcde"}

    async def call(name: str, num_sequences: int) -> None:
        async with admission.admitted(num_sequences):
            order.append(name)
            await leave[name].wait()

    tasks = {name: asyncio.create_task(call(name, size)) for name, size in zip("abcde", (2, 3, 1, 1, 1), strict=True)}
    await asyncio.sleep(0)
    assert order == ["a"]  # c would fit, but b came first
    tasks["d"].cancel()
    leave["a"].set()
    await asyncio.wait([tasks["d"], tasks["a"]])
    await asyncio.sleep(0)
    assert order == ["a", "b"]
    tasks["b"].cancel()
    await asyncio.wait([tasks["b"]])
    await asyncio.sleep(0)
    assert order == ["a", "b", "c", "e"]
    assert admission.num_running == 2
    for event in leave.values():
        event.set()
    await asyncio.gather(tasks["c"], tasks["e"])
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_turn_that_comes_as_its_caller_leaves_is_passed_on() -> None:
    admission = Admission(ApiSettings(max_concurrent=1, max_sequences=1, max_n=1))
    entered: list[str] = []

    async def call(name: str) -> None:
        async with admission.admitted(1):
            entered.append(name)

    async with admission.admitted(1):
        first, second = asyncio.create_task(call("first")), asyncio.create_task(call("second"))
        await asyncio.sleep(0)
    first.cancel()  # its turn has come, but it has not run since
    await asyncio.wait([first, second])
    assert entered == ["second"]
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_full_queue_is_an_error_that_says_when_to_come_back() -> None:
    admission = Admission(ApiSettings(max_concurrent=1, max_sequences=1, max_n=1, max_queued=1))
    async with admission.admitted(1):
        waiting = asyncio.create_task(admission.admitted(1).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="1 calls are queued"):
            await admission.admitted(1).__aenter__()
        waiting.cancel()
        await asyncio.wait([waiting])
