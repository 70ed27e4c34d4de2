"""Spans of targets and drafters below that of a call, from the gateway's header to the collector."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.drafter import DrafterActor
from actors.gateway import LinkClient
from actors.target import TargetActor, TargetInfo
from cluster.client import ClusterStatus
from cluster.config import (
    Config,
    DrafterConfig,
    ModelConfig,
    NgramOptions,
    ObservabilityConfig,
    TargetConfig,
    TransportConfig,
)
from cluster.messages import Open
from cluster.resolve import Inventory, Node, resolve
from cluster.sampling_params import SamplingParams
from cluster.spans import MAX_EVENTS, FinishedSpan, SpanEvent, open_spans
from cluster.types import Commit, Request
from drafters.draft_spans import DraftSpans
from engine.request_spans import RequestSpans
from router.cost_model import TableCost
from tests.support.api import MODEL, app_of, chat_body, listening, model_info, saying
from tests.support.asgi import CHAT
from tests.support.drafter_bench import Bench
from tests.support.linked_loops import LinkedTarget
from tests.support.otlp import attributes, collecting
from tests.support.scripted import ScriptedClient
from tests.support.settings import ALWAYS_DRAFTED
from tests.support.toys import ToyTarget
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("known_costs")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SAMPLING = SamplingParams(max_tokens=30, ignore_eos=True)
PASS_S = 0.04
TOKEN = "secret"


class Kept:
    """`cluster.spans.SpanSink` of this test."""

    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []

    def add(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def close(self) -> None: ...

    @property
    def by_name(self) -> Mapping[str, FinishedSpan]:
        assert len({span.name for span in self.spans}) == len(self.spans)
        return {span.name: span for span in self.spans}


# ---- the gateway


@pytest.mark.parametrize(("flags", "is_sent"), [("01", True), ("00", False)])
def test_requests_carry_the_span_of_their_call_if_it_is_sampled(flags: str, is_sent: bool) -> None:
    client = ScriptedClient(model_info(), saying("the answer"))
    with collecting() as collector:
        observability = ObservabilityConfig(otlp_endpoint=collector.url)
        with listening(app_of(client, observability=observability)) as url:
            httpx.post(f"{url}{CHAT}", json=chat_body(n=2), headers={"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
        traces = {request.trace for request in client.requests}
        if is_sent:
            server = collector.named(f"chat {MODEL}")
            assert traces == {f"00-{TRACE}-{server.span_id.hex()}-01"}
        else:
            assert traces == {""}


def test_without_an_endpoint_requests_carry_nothing() -> None:
    client = ScriptedClient(model_info(), saying("the answer"))
    with listening(app_of(client)) as url:
        httpx.post(f"{url}{CHAT}", json=chat_body(), headers={"traceparent": TRACEPARENT})
    assert [request.trace for request in client.requests] == [""]
    assert open_spans(ObservabilityConfig(), "target-0") is None


# ---- the target


class Served(LinkedTarget):
    """A target that plays its requests to their ends on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.kept = Kept()
        super().__init__(ToyTarget(), TableCost((1, 32), (PASS_S, PASS_S)), clock=self._look)
        self.loop.observer.spans = RequestSpans(self.kept, "target-0")

    def _look(self) -> float:
        """Goes on with each look at it."""
        self.now_s += PASS_S / 4
        return self.now_s

    def play(self, *requests: Request, num_rounds: int = 1000) -> list[Commit]:
        self.submit(*requests)
        commits: list[Commit] = []
        for _ in range(num_rounds):
            if not self.loop.step(self.now_s).executed:
                break
            commits += self.commits()
        return commits


REQUEST = Request("r", (1, 2, 3), SAMPLING, 0.0, trace=TRACEPARENT)


def test_a_target_makes_two_spans_of_a_traced_request_alone() -> None:
    served = Served()
    commits = served.play(REQUEST, replace(REQUEST, id="untraced", trace=""))
    of_request = [commit for commit in commits if commit.request_id == "r"]
    prefill, decode = served.kept.by_name["target prefill"], served.kept.by_name["target decode"]
    assert {prefill.parent, decode.parent} == {TRACEPARENT}
    assert 0.0 < prefill.start_s < prefill.end_s == decode.start_s < decode.end_s < served.now_s
    assert (prefill.attributes["outrider.prompt_tokens"], prefill.attributes["outrider.target"]) == (3, "target-0")
    expected = {
        "outrider.request_id": "r",
        "outrider.rounds": len(of_request),
        "outrider.output_tokens": 30,
        "outrider.verified_tokens": sum(commit.num_proposed for commit in of_request),
        "outrider.accepted_tokens": sum(commit.num_accepted for commit in of_request),
        "outrider.finish_reason": "length",
    }
    assert {key: decode.attributes[key] for key in expected} == expected
    assert len(decode.events) == len(of_request)


def test_a_request_that_is_given_up_has_spans_until_then_and_events_are_bounded() -> None:
    served = Served()
    served.play(replace(REQUEST, sampling=replace(SAMPLING, max_tokens=MAX_EVENTS + 20)), num_rounds=MAX_EVENTS + 5)
    assert served.kept.spans == []
    served.loop.fail_all("the target stops")
    decode = served.kept.by_name["target decode"]
    assert (decode.attributes["outrider.finish_reason"], decode.attributes["outrider.rounds"]) == ("abort", MAX_EVENTS + 5)
    assert len(decode.events) == MAX_EVENTS


# ---- the drafter


def traced(bench: Bench, request_id: str, trace: str = TRACEPARENT) -> None:
    bench.mail(opens=(Open(request_id, tuple(range(10)), 10, SamplingParams(max_tokens=1000), trace=trace),))


@pytest.mark.parametrize("ahead_len", [0, 4])
def test_a_drafter_makes_a_span_of_its_drafts_for_a_traced_request(ahead_len: int) -> None:
    bench, kept = Bench(ahead_len=ahead_len), Kept()
    bench.loop.sessions.spans = DraftSpans(kept, "counting")
    bench.now_s = 5.0
    traced(bench, "a")
    traced(bench, "untraced", trace="")
    bench.settle()
    bench.now_s = 6.0
    bench.extend("a", 10, 99)
    bench.settle()
    bench.mail(releases=("a", "untraced"))
    bench.settle()
    (span,) = kept.spans
    drafted = [batch for batch in bench.drafter.batches if any(one.request_id == "0/a" for one in batch)]
    assert (span.name, span.parent, span.start_s, span.end_s) == ("draft", TRACEPARENT, 5.0, 6.0)
    assert (span.attributes["outrider.drafter"], span.attributes["outrider.request_id"]) == ("counting", "a")
    assert span.attributes["outrider.batches"] == len(span.events) == len(drafted)
    first = {"outrider.drafted_tokens": 4, "outrider.batch_requests": 2}
    assert span.events[0] == SpanEvent("batch", 5.0, first)


def test_a_request_that_a_drafter_only_follows_has_no_span() -> None:
    bench, kept = Bench(limit=4), Kept()
    bench.loop.sessions.spans = DraftSpans(kept, "counting")
    traced(bench, "a")
    bench.mail(releases=("a",))
    bench.settle()
    assert kept.spans == []


# ---- to the collector


def test_spans_reach_the_collector_below_the_call_s(tiny_model_folder: Path) -> None:
    """A target, a drafter and a gateway over real links. The actors send what is queued when they end."""
    with collecting() as collector:
        with ExitStack() as stack:
            client = _linked(tiny_model_folder, stack, ObservabilityConfig(otlp_endpoint=collector.url))
            for request_id, trace in (("r", TRACEPARENT), ("untraced", "")):
                assert len(asyncio.run(client(request_id, trace))) == SAMPLING.max_tokens
        spans = {span.name: span for span in collector.spans}
        assert len(spans) == len(collector.spans)
    assert spans.keys() == {"target prefill", "target decode", "draft"}
    for span in spans.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    decode, draft = spans["target decode"], spans["draft"]
    assert attributes(decode)["outrider.drafters"] == [attributes(draft)["outrider.drafter"]] == ["ngram"]
    assert len(decode.events) == attributes(decode)["outrider.rounds"]
    assert draft.start_time_unix_nano <= decode.end_time_unix_nano  # on the wall's clock, which both show
    assert decode.start_time_unix_nano <= draft.end_time_unix_nano


def _linked(
    model: Path, stack: ExitStack, observability: ObservabilityConfig
) -> Callable[[str, str], Coroutine[Any, Any, list[int]]]:
    """Answers requests by id and trace, of a target and a drafter that end with ``stack``."""
    drafter_config = DrafterConfig(name="ngram", options=NgramOptions())
    config = Config(
        model=ModelConfig(name=str(model), max_model_len=256),
        target=TargetConfig(dtype="float32", device="cpu", kv_cache_gb=0.01),
        drafters=(drafter_config,),
        planner=ALWAYS_DRAFTED,
        transport=TransportConfig(host="127.0.0.1"),
        observability=observability,
    )
    target = TargetActor(resolve(config, Inventory((Node("here", 4.0),))), "target-0", "grpc://127.0.0.1:0", TOKEN)
    stack.callback(target.stop)
    info = target.start()
    assert isinstance(info, TargetInfo)
    drafter = DrafterActor(drafter_config, "ngram", info.model, [info.address], TOKEN, observability=observability)
    stack.callback(drafter.stop)
    drafter.start()

    def is_linked() -> bool:
        report = target.slot_report()
        return report is not None and "ngram" in report.drafters

    eventually(is_linked)

    async def answer(request_id: str, trace: str) -> list[int]:
        client = LinkClient("gateway", info.model, [info.address], no_status, TOKEN)
        try:
            assert await asyncio.to_thread(client.wait_linked, 20.0)
            request = Request(request_id, (5, 6, 7, 5, 6, 7, 5), SAMPLING, 0.0, trace=trace)
            return [token async for commit in client.generate(request) for token in commit.token_ids]
        finally:
            await client.close()

    return answer


async def no_status() -> ClusterStatus:
    raise AssertionError("nobody asks")
