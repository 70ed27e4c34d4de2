"""Objectives from a call to the metrics: which requests are refused for them, by prediction and by live targets."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actors.gateway import LinkClient
from benchmarks.embedded import EmbeddedCluster
from cluster.config import SloClass, SloConfig
from cluster.counts import MAX_CLASSES, OTHER, Attainment, SloCounts, summed
from cluster.errors import Unattainable
from cluster.types import FinishReason, Request, Slo
from router.cost_model import TableCost
from router.drafting.verification import MIN_CHUNK_LEN
from router.plan import Capacity, SequenceView, SloProgress, Span
from router.planning.admission import Departures, Load, exceeds_objective, predicted_ttft
from router.planning.slo import LATE_TOKENS
from tests.support.api import chat_body, finishing, serving, token_ids
from tests.support.requests import a_request
from tests.support.scripted import Step
from tests.support.toys import MODEL, ToyTarget
from tests.support.verification import RowsAttend

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


# ---- when the first token of a new request is predicted, and which requests are refused for it


ADMISSION_COST = TableCost((1, 1001), (0.01, 1.01))  # 10 ms, and 1 ms for each further row
CAPACITY = Capacity(
    block_len=16, num_blocks=512, num_free_blocks=512, max_num_sequences=8, max_pass_tokens=512, max_model_len=8192
)
NOW_S = 50.0


def prompt(num_tokens: int = 100, ttft_s: float | None = 0.5, **changes: Any) -> SequenceView:
    slo = None if ttft_s is None else SloProgress(NOW_S + ttft_s, None)
    return replace(SequenceView("new", num_tokens, 0, 0, False, None, None, 10, arrived_s=NOW_S, slo=slo), **changes)


def decoding(num: int) -> list[SequenceView]:
    return [SequenceView(f"d{i}", 20, 19, 0, True, None, None, 100, arrived_s=NOW_S - 1.0) for i in range(num)]


def ttft_s(
    request: SequenceView, sequences: list[SequenceView], load: Load | None = None, capacity: Capacity = CAPACITY
) -> float:
    predicted = predicted_ttft(request, sequences, load or Load(0, None), capacity, ADMISSION_COST, NOW_S)
    return predicted.queue_s + predicted.prefill_s


def test_an_idle_target_takes_the_time_of_the_prompt() -> None:
    assert ttft_s(prompt(), []) == pytest.approx(0.1)


def test_what_is_cached_is_not_computed() -> None:
    assert ttft_s(prompt(cached_len=80), []) == pytest.approx(0.02)
    earlier = prompt(200, 0.4, request_id="earlier", cached_len=160)
    assert ttft_s(prompt(), [earlier]) == pytest.approx(0.14)


def test_prompts_that_are_due_before_and_the_decode_load_come_on_top() -> None:
    earlier = prompt(200, 0.4, request_id="earlier")
    later, free = prompt(200, 0.6, request_id="later"), prompt(200, None, request_id="free")
    assert ttft_s(prompt(), [earlier, later, free]) == pytest.approx(0.3)
    assert ttft_s(prompt(), decoding(4)) == pytest.approx(0.1 + 0.013)
    assert ttft_s(prompt(), decoding(4), Load(20, None)) == pytest.approx(0.1 + 0.029), "drafts are rows too"
    half_done = replace(earlier, running=True, computed_len=150)
    assert ttft_s(prompt(), [half_done]) == pytest.approx(0.15)


def test_a_stream_with_an_objective_leaves_prompts_less_of_each_pass() -> None:
    stream = replace(decoding(1)[0], slo=SloProgress(None, 0.03, NOW_S - 0.03 * LATE_TOKENS, 1 + LATE_TOKENS))
    assert ttft_s(prompt(95), [stream]) == pytest.approx(0.095 + 5 * 0.01)  # 20 ms of each pass


def test_a_prompt_fits_passes_of_flat_cost_beside_a_stream_that_is_behind() -> None:
    """Nothing is left of the pass for prompts, and they take no time of it."""
    flat = TableCost((1, 1001), (0.01, 0.01))
    stream = replace(decoding(1)[0], slo=SloProgress(None, 0.01, NOW_S - 0.5, 1 + LATE_TOKENS))
    predicted = predicted_ttft(prompt(96), [stream], Load(0, None), CAPACITY, flat, NOW_S)
    assert predicted.prefill_s == pytest.approx(96 / MIN_CHUNK_LEN * 0.01)


def test_what_decoding_attends_to_does_not_delay_a_prompt() -> None:
    cost = RowsAttend((1, 1001), (0.01, 1.01))
    long = [replace(one, committed_len=5000, computed_len=4999) for one in decoding(4)]
    predicted = [predicted_ttft(prompt(), each, Load(0, None), CAPACITY, cost, NOW_S) for each in (decoding(4), long)]
    assert predicted[0] == predicted[1]


def test_a_request_waits_for_places_and_blocks() -> None:
    full = decoding(8)
    assert ttft_s(prompt(), full, Load(8, 2.0)) == pytest.approx(2.0 + 0.1 + 0.017)
    assert ttft_s(prompt(), full, Load(8, None)) == pytest.approx(0.1 + 0.017), "nothing is known of ends yet"
    ahead = prompt(10, 0.1, request_id="ahead")
    assert ttft_s(prompt(), [*full, ahead], Load(8, 2.0)) == pytest.approx(4.0 + 0.1 + 0.017)
    no_blocks = replace(CAPACITY, num_free_blocks=3)
    assert ttft_s(prompt(), decoding(1), Load(1, 2.0), no_blocks) == pytest.approx(2.0 + 0.1 + 0.01)


def test_only_what_a_later_attempt_could_meet_is_refused() -> None:
    def refused(request: SequenceView, sequences: list[SequenceView]) -> bool:
        predicted = predicted_ttft(request, sequences, Load(0, None), CAPACITY, ADMISSION_COST, NOW_S)
        return exceeds_objective(request, predicted, ADMISSION_COST)

    queue = [prompt(300, 0.1, request_id="before")]
    assert refused(prompt(100, 0.3), queue)
    assert not refused(prompt(100, 0.5), queue)
    assert not refused(prompt(100, None), queue)
    assert not refused(prompt(100, 0.05), queue), "an idle target would miss it as well"


def test_departures_are_those_of_a_busy_target() -> None:
    departures = Departures()
    for i in range(10):
        departures.note(float(i), 2)
    assert departures.interval_s == pytest.approx(0.5)
    departures.idle()
    departures.note(1000.0, 1)
    assert departures.interval_s == pytest.approx(0.5)
    departures.note(1150.0, 1)
    assert departures.interval_s == pytest.approx(0.5, abs=0.1), "a pause of the machine"


def test_answers_count_by_class_and_objective() -> None:
    slo = Slo(0.5, 0.05, "tight")
    attainment = Attainment()
    for ttft, tpot in ((0.5, 0.05), (0.6, 0.04), (0.1, 0.06), (0.1, None)):
        attainment.note(SloCounts.of_answer(slo, ttft, tpot))
    attainment.note(SloCounts.of_answer(Slo(name="batch"), 9.0, 9.0))
    attainment.note(SloCounts("tight", num_refused=1))
    tight, batch = attainment.counts()
    assert tight == SloCounts("tight", 4, 2, 3, 1, 2, 1, 1)
    assert batch == SloCounts("batch", 1, 1)
    assert summed((tight, batch, tight))[0] == SloCounts("tight", 8, 4, 6, 2, 4, 2, 2)


def test_classes_that_peers_invent_take_no_memory_without_bound() -> None:
    attainment = Attainment()
    for i in range(2 * MAX_CLASSES):
        attainment.note(SloCounts(f"c{i}", 1))
    counts = attainment.counts()
    assert len(counts) == MAX_CLASSES + 1
    assert counts[-1] == SloCounts(OTHER, MAX_CLASSES)
