"""Objectives from a call to the metrics: refusals by live targets, their answers, and counts."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.gateway import LinkClient
from benchmarks.embedded import EmbeddedCluster
from cluster.config import SloClass, SloConfig
from cluster.counts import SloCounts
from cluster.errors import Unattainable
from cluster.types import FinishReason, Request, Slo
from router.cost_model import TableCost
from router.plan import Span
from tests.support.api import chat_body, finishing, serving, token_ids
from tests.support.requests import a_request
from tests.support.scripted import Step
from tests.support.toys import MODEL, ToyTarget

CHAT = "/v1/chat/completions"
SLO = SloConfig(classes={"interactive": SloClass(ttft_ms=60_000, tpot_ms=60_000), "batch": SloClass()})
COST = TableCost((1, 32), (0.02, 0.5))


def series(text: str, name: str) -> dict[str, float]:
    return {labels: float(value) for labels, value in re.findall(rf"^outrider_{name}{{(.*)}} (\S+)$", text, re.MULTILINE)}


async def test_a_refused_call_is_told_when_to_try_again_and_counted() -> None:
    def script(request: Request) -> list[Step]:
        return [Unattainable("the first token would come after 7.00 s", 6.5)]

    async with serving(script, slo=SLO) as (http, _):
        answer = await http.post(CHAT, json=chat_body(slo="interactive", n=2))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "slo_unattainable")
        assert answer.headers["retry-after"] == "7"
        text = (await http.get("/metrics")).text
    assert series(text, "slo_shed_total") == {'slo_class="interactive"': 2.0}
    assert series(text, "slo_objectives_total") == {}


async def test_answers_are_counted_by_class_and_those_without_one_are_not() -> None:
    async with serving(slo=SLO) as (http, _):
        for slo in ("interactive", "interactive", "batch", None, {"ttft_ms": 1e-3}):
            assert (await http.post(CHAT, json=chat_body(slo=slo))).status_code == 200
        text = (await http.get("/metrics")).text
    counts = series(text, "slo_objectives_total")
    assert counts['objective="ttft",outcome="met",slo_class="interactive"'] == 2
    assert counts['objective="ttft",outcome="missed",slo_class="custom"'] == 1
    assert series(text, "slo_ttft_seconds_count") == {
        'slo_class="interactive"': 2.0,
        'slo_class="batch"': 1.0,
        'slo_class="custom"': 1.0,
    }


class Slow(ToyTarget):
    """Takes some time for a pass, so that streams are live for a while."""

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        time.sleep(0.01)
        return super().execute(spans)


def request(name: str, slo: Slo, prompt_len: int = 4, max_tokens: int = 40) -> Request:
    return a_request(
        name,
        (i % 12 for i in range(prompt_len)),
        max_tokens=max_tokens,
        temperature=1.0,
        seed=1,
        ignore_eos=True,
        arrival_s=time.monotonic(),
        slo=slo,
    )


def test_a_live_target_refuses_what_its_streams_delay_too_much_and_takes_the_rest() -> None:
    async def calls(client: LinkClient) -> None:
        tight = request("tight", Slo(0.13, None, "tight"))
        streams = [client.generate(request(f"stream{i}", Slo(), max_tokens=90)) for i in range(6)]
        for stream in streams:
            await anext(stream)
        # By the cost model the prompt takes 66 ms, and the rows of six streams 97 ms. Of the 130 ms the call has used some.
        with pytest.raises(Unattainable, match=r"would come after 0\.16 s, the objective leaves 0\.[01]\d s") as refused:
            await anext(client.generate(replace(tight, arrival_s=time.monotonic())))
        assert refused.value.retry_after_s >= 1.0
        answers = [commit async for commit in client.generate(request("lax", Slo(60.0, 60.0, "lax")))]
        assert answers[-1].finish is FinishReason.LENGTH
        for stream in streams:
            await stream.aclose()

    with EmbeddedCluster(Slow(num_blocks=2048), MODEL, COST, {}) as cluster:
        asyncio.run(calls(cluster.client))
        counts = {one.name: one for one in cluster.loop.telemetry.attainment.counts()}
    assert counts == {"tight": SloCounts("tight", num_refused=1), "lax": SloCounts("lax", 1, 1, 1, 0, 1, 0, 0)}


async def test_a_call_that_waited_longer_than_its_objective_is_refused_in_its_turn() -> None:
    release, begun = asyncio.Event(), asyncio.Event()

    def script(request: Request) -> list[Step]:
        begun.set()
        return [release, *finishing(request, token_ids("the answer"))]

    limits = {"max_concurrent": 1, "max_queued": 4, "max_sequences": 1, "max_n": 1}
    async with serving(script, slo=SLO, **limits) as (http, cluster):
        running = asyncio.create_task(http.post(CHAT, json=chat_body()))
        await begun.wait()
        late = asyncio.create_task(http.post(CHAT, json=chat_body(slo={"ttft_ms": 1})))
        patient = asyncio.create_task(http.post(CHAT, json=chat_body(slo="interactive")))
        while "outrider_requests_queued 2.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110 - seen from outside
            await asyncio.sleep(0.001)
        release.set()
        assert [(await call).status_code for call in (running, late, patient)] == [200, 429, 200]
        assert (await late).json()["error"]["code"] == "slo_unattainable"
        assert len(cluster.requests) == 2
