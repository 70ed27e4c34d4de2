"""Which calls run, wait or are refused, and that tenants cannot starve each other."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cluster.types import Request
from deploy.api.admission import Admission
from deploy.api.errors import ApiError
from deploy.api.settings import SPARE_CALLS, ApiSettings
from deploy.api.tenants import ApiKeys
from router.planning.fair_share import SharedLimit, TokenCounters
from tests.support.api import chat_body, completion_body, finishing, serving, token_ids
from tests.support.asgi import CHAT, Caller
from tests.support.scripted import Step


def _admission(max_queued: int = 64) -> Admission:
    return Admission(ApiSettings(max_concurrent=1, max_sequences=1, max_n=1, max_queued=max_queued))


async def _order(calls: list[tuple[str, int]]) -> list[str]:
    """In which order calls (tenant, prompt tokens) that arrive while another runs are admitted."""
    admission = _admission()
    order: list[str] = []

    async def call(tenant: str, num_tokens: int) -> None:
        async with admission.admitted(1, tenant, num_tokens):
            order.append(tenant)

    async with admission.admitted(1, "busy"):
        tasks = [asyncio.create_task(call(*one)) for one in calls]
        await asyncio.sleep(0)
        assert admission.num_queued == len(calls)
    await asyncio.gather(*tasks)
    assert (admission.num_queued, admission.num_running) == (0, 0)
    return order


async def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    assert (await _order([("flood", 10)] * 20 + [("other", 10)] * 2))[:4] == ["flood", "other", "flood", "other"]


async def test_control_one_shared_tenant_is_first_come_first_served() -> None:
    """What the test above sees without tenants: the 21st call is the 21st."""
    admission = _admission()
    order: list[int] = []

    async def call(number: int) -> None:
        async with admission.admitted(1, "all", 10):
            order.append(number)

    async with admission.admitted(1, "all"):
        tasks = [asyncio.create_task(call(number)) for number in range(22)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == list(range(22))


async def test_shares_are_of_tokens_and_not_of_calls() -> None:
    order = await _order([("long", 30)] * 4 + [("short", 10)] * 12)
    assert order[:8].count("long") == 2


async def test_a_full_queue_refuses_the_tenant_that_fills_it() -> None:
    admission = _admission(max_queued=3)
    async with admission.admitted(1, "busy"):
        flood = [asyncio.create_task(admission.admitted(1, "flood").__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        other = asyncio.create_task(admission.admitted(1, "other").__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="queued"):
            await flood[-1]
        with pytest.raises(ApiError, match="queued"):
            await admission.admitted(1, "flood").__aenter__()
        assert not other.done()
        assert admission.num_queued == 3
        for task in (*flood[:2], other):
            task.cancel()
        await asyncio.gather(*flood, other, return_exceptions=True)
    assert (admission.num_queued, admission.num_running) == (0, 0)


def test_idle_time_is_no_credit() -> None:
    counters = TokenCounters()
    counters.arrive("busy", ())
    counters.charge("busy", 1000)
    counters.arrive("busy", ())
    counters.arrive("new", ("busy",))
    counters.charge("new", 1)
    assert counters.next_of(("busy", "new")) == "busy"


async def test_keys_are_tenants_of_the_served_api(tmp_path: Path) -> None:
    """The flood's calls came first, and the other key's call is generated second."""
    file = tmp_path / "keys"
    file.write_text("sk-flood\nsk-other\n")
    keys = ApiKeys.from_file(file)
    assert keys.check("Bearer sk-flood") != keys.check("Bearer sk-other")
    release = asyncio.Event()
    lengths: list[int] = []

    def script(request: Request) -> list[Step]:
        lengths.append(request.sampling.max_tokens)
        return [release, *finishing(request, token_ids("the answer"))]

    async with serving(script, api_keys_file=file, max_concurrent=1, max_sequences=1, max_n=1, max_queued=8) as (
        http,
        cluster,
    ):

        def post(key: str, max_tokens: int) -> asyncio.Task[object]:
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(http.post(CHAT, json=chat_body(max_tokens=max_tokens), headers=headers))

        async def queued(count: int) -> None:
            while f"outrider_requests_queued {count}.0" not in (await http.get("/metrics", headers=auth)).text:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0)

        auth = {"authorization": "Bearer sk-other"}
        calls = [post("sk-flood", 11)]
        await cluster.asked(1)
        for count in (1, 2, 3):
            calls.append(post("sk-flood", 11))
            await queued(count)
        calls.append(post("sk-other", 12))
        await queued(4)
        release.set()
        await asyncio.gather(*calls)
    assert lengths.index(12) <= 2


async def test_the_tokens_of_an_answer_count_before_the_next_call_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-long\nsk-short\n")
    release = asyncio.Event()
    order: list[int] = []

    def script(request: Request) -> list[Step]:
        order.append(request.sampling.max_tokens)
        answer = finishing(request, token_ids("the answer") * (request.sampling.max_tokens // 10))
        return [release, *answer] if len(order) == 2 else answer

    async with serving(script, api_keys_file=file, max_concurrent=1, max_sequences=1, max_n=1) as (http, cluster):

        async def call(key: str, max_tokens: int) -> int:
            body = completion_body(max_tokens=max_tokens)
            return (await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})).status_code

        assert await call("sk-short", 11) == 200
        calls = [asyncio.create_task(call("sk-long", 200))]
        await cluster.asked(2)
        for num_queued, (key, max_tokens) in enumerate([("sk-long", 12), ("sk-short", 13)], start=1):
            calls.append(asyncio.create_task(call(key, max_tokens)))
            while f"outrider_requests_queued {num_queued}.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0)
        release.set()
        assert await asyncio.gather(*calls) == [200, 200, 200]
    assert order == [11, 200, 13, 12]


def _take_all(limit: SharedLimit, tenant: str) -> int:
    """How many ``tenant`` holds when it takes one after the other until one is too much."""
    num = 0
    while True:
        limit.hold(tenant, 1)
        if limit.is_exceeded(tenant, least=1):
            limit.give_back(tenant, 1)
            return num
        num += 1


def test_a_tenant_leaves_something_free_for_others() -> None:
    limit = SharedLimit(300)
    assert _take_all(limit, "alone") == 300  # there is no other one
    limit.give_back("alone", 300)
    limit.is_shared = True
    assert [_take_all(limit, name) for name in ("first", "second")] == [200, 66]
    held = {"first": 200, "second": 66}
    for turn in range(20):  # as calls end and others come, the shares become alike
        for name in held:
            limit.give_back(name, 20)
            held[name] -= 20
        for name in sorted(held, reverse=turn % 2 == 0):
            held[name] += _take_all(limit, name)
    assert held == {"first": pytest.approx(120, abs=30), "second": pytest.approx(120, abs=30)}
    assert limit.num_held == sum(held.values()) < 300


def test_a_tenant_may_always_hold_the_least_unless_nothing_is_free() -> None:
    limit = SharedLimit(100)
    limit.is_shared = True
    limit.hold("first", 60)
    limit.hold("second", 38)
    assert limit.is_exceeded("second", least=1)
    assert not limit.is_exceeded("second", least=38)
    limit.hold("third", 3)
    assert limit.is_exceeded("third", least=3)


async def test_a_tenant_can_take_neither_all_calls_nor_all_memory_of_bodies(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-flood\nsk-other\n")
    limits = {"max_concurrent": 1, "max_queued": 1, "max_sequences": 1, "max_n": 1}
    ended = asyncio.Event()

    async def endless(num_bytes: int) -> AsyncIterator[bytes]:
        yield b" " * num_bytes
        await ended.wait()
        yield b"{}"

    async def flood(num_calls: int, num_bytes: int, **settings: int) -> tuple[int, int]:
        """How many of ``sk-flood``'s calls are refused, and the status of a call of the other tenant meanwhile."""
        headers = {"content-type": "application/json", "authorization": "Bearer sk-flood"}
        ended.clear()
        async with serving(api_keys_file=file, **limits, **settings) as (http, _):
            bodies = [endless(num_bytes) for _ in range(num_calls)]
            calls = [asyncio.create_task(http.post(CHAT, content=body, headers=headers)) for body in bodies]
            seen = f'outrider_requests_total{{endpoint="{CHAT}",status="429"}}'
            while seen not in (await http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0)
            other = await http.post(CHAT, json=chat_body(), headers={"authorization": "Bearer sk-other"})
            ended.set()
            return [answer.status_code for answer in await asyncio.gather(*calls)].count(429), other.status_code

    num_refused, status = await flood(2 + SPARE_CALLS, 1)
    assert (num_refused, status) == ((2 + SPARE_CALLS) // 3, 200)
    num_refused, status = await flood(9, 1000, max_held_bytes=9100, max_request_bytes=4000)
    assert (num_refused, status) == (3, 200)


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
