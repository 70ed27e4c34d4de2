"""Tenants that cannot starve each other: whose call is admitted next, and whose is refused."""

import asyncio
from pathlib import Path

import pytest

from cluster.types import Request
from deploy.api.admission import Admission
from deploy.api.errors import ApiError
from deploy.api.keys import ApiKeys
from deploy.api.settings import ApiSettings
from router.fair_share import TokenCounters
from tests.support.api import chat_body, completion_body, finishing, serving, token_ids
from tests.support.asgi import CHAT
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
