"""Limits of tenants: budgets, refusals and refunds, and shares of the queue."""

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import LinkClosed, Overloaded, Unattainable
from cluster.types import Commit, FinishReason, Request
from deploy.api.admission import Admission
from deploy.api.errors import ApiError
from deploy.api.metrics import MAX_TENANTS, Metrics
from deploy.api.settings import ApiSettings
from deploy.api.tenants import Budgets, Tenant
from router.planning.token_budgets import Budget, Limits, TokenBucket
from tests.support.api import MODEL, chat_body, completion_body, finishing, saying, token_ids
from tests.support.asgi import CHAT
from tests.support.scripted import Step
from tests.support.tenants import auth, limited

COMPLETIONS = "/v1/completions"


async def test_too_many_requests_are_refused_with_the_time_to_wait(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_minute=2) as (http, cluster):
        first, second = [await http.post(CHAT, json=chat_body(), headers=auth(key)) for key in ("sk-one", "sk-two")]
        assert (first.status_code, second.status_code) == (200, 200)
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second)] == ["1", "0"]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        refused = await http.post(CHAT, content=b"not read", headers=auth("sk-one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-ratelimit-limit-tokens" not in refused.headers
        assert (await http.get("/v1/models", headers=auth("sk-one"))).status_code == 200
        assert len(cluster.requests) == 2
        metrics = (await http.get("/metrics")).text
        assert 'outrider_tenant_over_budget_total{budget="requests",tenant="limited"} 1.0' in metrics


@pytest.mark.parametrize(
    ("per_minute", "burst_minutes", "num_taken", "reset"),
    [
        (60, 1.0, 0, "0s"),
        (60_000, 1.0, 17, "17ms"),
        (40, 1.0, 1, "1.5s"),
        (60, 1.0, 59, "59s"),
        (10, 6.0, 60, "6m0s"),
        (40, 60.0, 41, "1m1.5s"),
        (1, 60.0, 60, "1h0m0s"),
        (1, 1440.0, 1440, "24h0m0s"),
    ],
)
def test_times_of_headers_are_written_as_openai_writes_them(
    per_minute: int, burst_minutes: float, num_taken: int, reset: str
) -> None:
    tenant = Tenant("a", limits=Limits(per_minute, burst_minutes=burst_minutes))
    budgets = Budgets(lambda *_: None)
    budgets.set_tenants([tenant], 1, 0.0)
    for _ in range(num_taken):
        budgets.take_request(tenant, 0.0)
    assert dict(budgets.headers(tenant, 0.0))[b"x-ratelimit-reset-requests"] == reset.encode()


async def test_a_tenant_over_its_budget_takes_nothing_from_another(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_minute=1) as (http, _):
        codes = [(await http.post(CHAT, json=chat_body(), headers=auth("sk-one"))).status_code for _ in range(3)]
        assert codes == [200, 429, 429]
        free = [await http.post(CHAT, json=chat_body(), headers=auth("sk-free")) for _ in range(9)]
        assert {answer.status_code for answer in free} == {200}
        assert not [name for name in free[0].headers if name.startswith("x-ratelimit")]


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def test_max_tokens_are_charged_at_first_and_the_unused_given_back(tmp_path: Path) -> None:
    """The budget holds one call's max_tokens, so the second fits only if the first gave back what it did not use."""
    async with limited(tmp_path, saying("the answer"), tokens_per_minute=200) as (http, _):
        body = completion_body(max_tokens=150)
        first = await http.post(COMPLETIONS, json=body, headers=auth("sk-one"))
        used = first.json()["usage"]
        assert remaining(first) == 200 - used["prompt_tokens"] - 150
        second = await http.post(COMPLETIONS, json=body, headers=auth("sk-one"))
        assert second.status_code == 200
        assert 0 <= remaining(second) - (remaining(first) - used["total_tokens"]) <= 4  # what a second or so brings
        metrics = (await http.get("/metrics")).text
        expected = f'outrider_tenant_tokens_total{{kind="output",tenant="limited"}} {2 * used["completion_tokens"]}.0'
        assert expected in metrics


async def test_tokens_that_are_not_there_are_refused(tmp_path: Path) -> None:
    def stays(request: Request) -> list[Step]:
        return [release, *finishing(request, token_ids("the answer"))]

    release = asyncio.Event()
    async with limited(tmp_path, stays, tokens_per_minute=200) as (http, cluster):
        body = completion_body(max_tokens=150)
        running = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=auth("sk-one")))
        await cluster.asked(1)
        refused = await http.post(COMPLETIONS, json=body, headers=auth("sk-two"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) > 20
        assert len(cluster.requests) == 1
        release.set()
        assert (await running).status_code == 200
        usage = running.result().json()["usage"]
        metrics = (await http.get("/metrics")).text
        assert f"outrider_prompt_tokens_total {float(usage['prompt_tokens'])}\n" in metrics  # of the refused call none
        never = await http.post(COMPLETIONS, json=completion_body(max_tokens=220), headers=auth("sk-two"))
        assert (never.status_code, never.json()["error"]["code"]) == (400, "tokens_per_minute_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(max_completion_tokens=150)),
        ("/v1/responses", {"model": MODEL, "input": "what is it?", "max_output_tokens": 150}),
        (CHAT, chat_body()),
    ],
)
async def test_the_refusal_of_a_call_that_never_fits_names_no_field_that_the_call_lacks(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with limited(tmp_path, tokens_per_minute=100) as (http, _):
        refused = await http.post(path, json=body, headers=auth("sk-one"))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "tokens_per_minute_exceeded", None)
        assert "max_tokens" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_fails_gives_back_what_it_did_not_use(tmp_path: Path, stream: bool) -> None:
    async with limited(tmp_path, lambda _: [LinkClosed("gone")], tokens_per_minute=200) as (http, _):
        body = completion_body(max_tokens=150, stream=stream)
        for _ in range(4):  # each would take three quarters of the budget
            assert (await http.post(COMPLETIONS, json=body, headers=auth("sk-one"))).status_code == 503


LONG = completion_body(prompt=[1] * 120, max_tokens=30)  # three quarters of a budget of 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Overloaded("full", 1.0), 429),
        (Unattainable("late", 1.0), 429),
        (LinkClosed("no target"), 503),
        (FinishReason.OVERLOADED, 429),
        (FinishReason.ABORT, 503),
        (FinishReason.DRAINING, 503),
    ],
)
async def test_a_prompt_that_targets_refuse_is_charged_nowhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusal: Exception | FinishReason,
    status: int,
    stream: bool,
) -> None:
    charged: list[float] = []
    monkeypatch.setattr("deploy.api.admission.TokenCounters.charge", lambda _self, _tenant, amount: charged.append(amount))
    caplog.set_level("INFO", "deploy.api.access")

    def refuses(request: Request) -> list[Step]:
        return [refusal if isinstance(refusal, Exception) else Commit(request.id, 120, (), finish=refusal)]

    async with limited(tmp_path, refuses, tokens_per_minute=200) as (http, _):
        for _ in range(3):
            answer = await http.post(COMPLETIONS, json=LONG | {"stream": stream, "n": 1}, headers=auth("sk-one"))
            assert (answer.status_code, answer.json()["error"]["code"] == "rate_limit_exceeded") == (status, False)
        metrics = (await http.get("/metrics")).text
    assert 'outrider_tenant_tokens_total{kind="prompt",tenant="limited"} 0.0' in metrics
    assert "outrider_prompt_tokens_total 0.0" in metrics
    assert sum(charged) == 0
    assert [record.fields["prompt_tokens"] for record in caplog.records if record.name == "deploy.api.access"][:3] == [0] * 3


@pytest.mark.parametrize("last", [LinkClosed("gone"), Overloaded("full", 1.0)])
async def test_a_prompt_that_a_target_began_to_answer_is_charged(tmp_path: Path, last: Exception) -> None:
    """Also where another choice is refused."""

    def breaks(request: Request) -> list[Step]:
        return [Commit(request.id, 120, (5,)), last] if request.id.endswith("-0") else [last]

    async with limited(tmp_path, breaks, tokens_per_minute=200) as (http, _):
        await http.post(COMPLETIONS, json=LONG | {"n": 2}, headers=auth("sk-one"))
        metrics = (await http.get("/metrics")).text
        assert 'outrider_tenant_tokens_total{kind="prompt",tenant="limited"} 120.0' in metrics
        refused = await http.post(COMPLETIONS, json=LONG, headers=auth("sk-one"))
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_client_that_leaves_gets_back_what_it_did_not_use(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with limited(tmp_path, lambda _: [never], tokens_per_minute=200) as (http, cluster):
        body = completion_body(max_tokens=150)
        for count in range(1, 5):
            call = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=auth("sk-one")))
            await cluster.asked(count)
            call.cancel()
            await asyncio.wait([call])


async def test_a_call_wider_than_the_tenant_s_limit_is_refused(tmp_path: Path) -> None:
    async with limited(tmp_path, max_concurrent_requests=2) as (http, _):
        assert (await http.post(CHAT, json=chat_body(n=2), headers=auth("sk-one"))).status_code == 200
        refused = await http.post(CHAT, json=chat_body(n=3), headers=auth("sk-one"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert (await http.post(CHAT, json=chat_body(n=3), headers=auth("sk-free"))).status_code == 200


def _admission(**tenants: Tenant) -> Admission:
    settings = ApiSettings(max_concurrent=3, max_sequences=1, max_n=1, max_queued=64)
    admission = Admission(settings)
    admission.set_tenants(tenants)
    return admission


async def test_a_tenant_at_its_limit_waits_and_others_pass() -> None:
    admission = _admission(narrow=Tenant("narrow", max_concurrent=1))
    order: list[str] = []
    leave = {name: asyncio.Event() for name in ("narrow 1", "narrow 2", "other")}

    async def call(name: str) -> None:
        async with admission.admitted(1, name.split()[0]):
            order.append(name)
            await leave[name].wait()

    tasks = []
    for name in leave:
        tasks.append(asyncio.create_task(call(name)))
        await asyncio.sleep(0)
    assert order == ["narrow 1", "other"]
    assert (admission.num_queued, admission.num_running) == (1, 2)
    leave["narrow 1"].set()
    await asyncio.wait(tasks[:1])
    await asyncio.sleep(0)
    assert order == ["narrow 1", "other", "narrow 2"]
    for event in leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert (admission.num_queued, admission.num_running) == (0, 0)


async def test_a_waiting_call_that_a_new_limit_excludes_fails_and_blocks_no_other() -> None:
    admission = _admission(one=Tenant("one", max_concurrent=3))
    ran: list[int] = []

    async def call(width: int) -> None:
        async with admission.admitted(width, "one"):
            ran.append(width)

    async with admission.admitted(1, "one"):
        tasks = [asyncio.create_task(call(width)) for width in (3, 2)]
        await asyncio.sleep(0)
        admission.set_tenants({"one": Tenant("one", max_concurrent=2)})
        with pytest.raises(ApiError, match="n: 3 sequences exceed the 2 that a call of one may have"):
            await tasks[0]
        with pytest.raises(ApiError, match="n: 3 sequences"):  # checked before, arrived after the change
            await call(3)
        assert ran == []
    await asyncio.wait_for(tasks[1], 60)
    assert (ran, admission.num_queued, admission.num_running) == ([2], 0, 0)


async def test_shares_of_the_queue_are_as_the_weights() -> None:
    admission = _admission(heavy=Tenant("heavy", weight=3.0))
    order: list[str] = []

    async def call(tenant: str) -> None:
        async with admission.admitted(1, tenant, 10):
            order.append(tenant)
            await asyncio.sleep(0)

    async with admission.admitted(3, "busy"):
        tasks = [asyncio.create_task(call(tenant)) for tenant in ["light"] * 20 + ["heavy"] * 20]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert 14 <= order[:20].count("heavy") <= 16


def test_tenants_cannot_make_any_number_of_series() -> None:
    metrics = Metrics(600.0)
    for i in range(2 * MAX_TENANTS):
        metrics.record_tenant(f"t{i}", 1, 1)
        metrics.record_over_budget(f"t{i}", "tokens")
    text = metrics.render(None).decode()
    assert text.count("outrider_tenant_over_budget_total{") == MAX_TENANTS + 1
    assert f'outrider_tenant_over_budget_total{{budget="tokens",tenant="other"}} {MAX_TENANTS}.0' in text


async def test_a_call_without_a_limit_reserves_less_than_the_context(tmp_path: Path) -> None:
    """And is charged in the end for what it used."""
    async with limited(tmp_path, tokens_per_minute=4000) as (http, cluster):
        cluster.info = replace(cluster.info, max_model_len=100_000)
        answer = await http.post(CHAT, json=chat_body(), headers=auth("sk-one"))
        assert answer.status_code == 200, answer.text
        assert cluster.requests[0].sampling.max_tokens > 99_000
        headers = (await http.post(CHAT, json=chat_body(max_tokens=1), headers=auth("sk-one"))).headers
        used = answer.json()["usage"]["total_tokens"]
        assert 4000 - 2 * used - 1 <= int(headers["x-ratelimit-remaining-tokens"]) < 4000
        refused = await http.post(CHAT, json=chat_body(max_tokens=50_000), headers=auth("sk-one"))
        assert refused.json()["error"]["code"] == "tokens_per_minute_exceeded"


# ---- token buckets: what a tenant may use per minute, and when it may again


def test_a_bucket_is_full_at_first_and_fills_at_its_rate() -> None:
    bucket = TokenBucket(10, 2.0)
    assert bucket.wait_s(10, 100.0) == 0
    bucket.take(10, 100.0)
    assert bucket.wait_s(4, 100.0) == 2.0
    assert bucket.level(101.0) == 2.0
    assert bucket.wait_s(4, 101.0) == 1.0
    assert bucket.level(1e6) == 10


def test_what_is_given_back_can_be_taken_and_never_exceeds_the_size() -> None:
    bucket = TokenBucket(10, 1.0)
    bucket.take(8, 0.0)
    bucket.give_back(5)
    assert bucket.level(0.0) == 7
    bucket.give_back(50)
    assert bucket.level(0.0) == 10


def test_a_clock_that_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(10, 1.0)
    bucket.take(10, 50.0)
    assert bucket.level(20.0) == 0
    assert bucket.level(51.0) == 1


@given(seed=st.integers(0, 2**32), per_minute=st.integers(1, 10_000), burst=st.floats(0.1, 10.0))
def test_no_interval_sees_more_than_the_rate_and_a_burst(seed: int, per_minute: int, burst: float) -> None:
    """Whoever asks at any times for any amounts, and gives some back, gets at most size + rate x time."""
    rng = random.Random(seed)
    bucket = Budget(Limits(tokens_per_minute=per_minute, burst_minutes=burst)).tokens
    assert bucket is not None
    now_s, used = 0.0, 0.0
    for _ in range(60):
        now_s += rng.expovariate(1.0)
        amount = rng.uniform(0, 1.2) * bucket.size
        if amount <= bucket.size and bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            unused = rng.choice([0.0, amount / 2])
            bucket.give_back(unused)
            used += amount - unused
        assert -1e-6 <= bucket.level(now_s) <= bucket.size
        assert used <= bucket.size + now_s * per_minute / 60 + 1e-6


def test_after_its_wait_the_amount_is_there() -> None:
    bucket = TokenBucket(7, 0.3)
    bucket.take(7, 0.0)
    wait_s = bucket.wait_s(5, 0.0)
    assert bucket.wait_s(5, math.ceil(wait_s)) == 0


@pytest.mark.parametrize(("per_minute", "burst", "size"), [(60, 1.0, 60), (60, 0.5, 30), (1, 0.1, 1)])
def test_a_burst_is_in_minutes_and_at_least_one(per_minute: int, burst: float, size: float) -> None:
    budget = Budget(Limits(requests_per_minute=per_minute, burst_minutes=burst))
    assert budget.requests is not None
    assert (budget.requests.size, budget.tokens) == (size, None)
