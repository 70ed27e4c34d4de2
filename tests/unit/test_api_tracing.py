"""Traces of calls, as a collector receives them."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from cluster.config import Config, ObservabilityConfig
from cluster.errors import InvalidField, LinkClosed
from cluster.strict_yaml import ConfigError, parse
from cluster.types import Prefill
from deploy.api.app import check_tracing
from tests.support.api import MODEL, app_of, chat_body, completion_body, finishing, listening, model_info, saying, token_ids
from tests.support.asgi import CHAT, answering
from tests.support.otlp import attributes, collecting
from tests.support.scripted import ScriptedClient

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = ({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"} for flags in ("01", "00"))


@contextmanager
def traced(endpoint: str | None, script: Any = None, **observability: Any) -> Iterator[httpx.Client]:
    """A client of the app behind a real server, whose end sends what is queued."""
    config = ObservabilityConfig(otlp_endpoint=endpoint, **observability)
    app = app_of(ScriptedClient(model_info(), script or saying("the answer")), observability=config)
    with listening(app) as url, httpx.Client(base_url=url, trust_env=False) as http:
        yield http


def within(outer: Span, inner: Span) -> bool:
    # Server spans begin a little before the call's arrival is noted.
    return outer.start_time_unix_nano <= inner.start_time_unix_nano + 1_000_000 and (
        inner.start_time_unix_nano <= inner.end_time_unix_nano <= outer.end_time_unix_nano + 1_000_000
    )


def slow_prefill(request: Any) -> Any:
    commits = finishing(request, token_ids("the answer"), num_per_round=3, drafter="ngram")
    return [replace(commits[0], prefill=Prefill(2, 0.25, 0.5)), *commits[1:]]


def test_a_call_is_a_span_of_its_caller_s_trace_with_a_child_for_each_stage() -> None:
    with collecting() as collector:
        with traced(collector.url, slow_prefill) as http:
            answer = http.post(CHAT, json=chat_body(n=2), headers=SAMPLED)
        server = collector.named(f"chat {MODEL}")
        assert (server.trace_id.hex(), server.parent_span_id.hex(), server.kind) == (TRACE, PARENT, Span.SPAN_KIND_SERVER)
        usage, found = answer.json()["usage"], attributes(server)
        assert found["gen_ai.response.id"] == answer.json()["id"]
        assert found["outrider.request_id"] == answer.headers["x-request-id"]
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert found["gen_ai.response.finish_reasons"] == ["stop", "stop"]
        assert (found["http.route"], found["http.response.status_code"]) == (CHAT, 200)
        assert found["outrider.drafters"] == ["ngram"]
        children = [span for span in collector.spans if span is not server and span.name != server.name]
        assert sorted(span.name for span in children) == ["decode", "decode", "prefill", "prefill", "queue"]
        for span in children:
            assert (span.trace_id, span.parent_span_id) == (server.trace_id, server.span_id)
            assert within(server, span)
        prefill = next(attributes(span) for span in children if span.name == "prefill")
        assert (prefill["outrider.cached_tokens"], prefill["outrider.target_prefill_s"]) == (2, 0.5)
        decodes = [attributes(span) for span in children if span.name == "decode"]
        accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        assert accepted > 0
        assert sum(decode["outrider.accepted_tokens"] for decode in decodes) == accepted
        assert [decode["outrider.drafters.verified_tokens"] for decode in decodes] == [
            [decode["outrider.verified_tokens"]] for decode in decodes
        ]


def test_a_stage_begins_where_the_one_before_ends() -> None:
    with collecting() as collector:
        with traced(collector.url) as http:
            http.post("/v1/completions", json=completion_body())
        queue, prefill, decode = map(collector.named, ("queue", "prefill", "decode"))
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        server = collector.named(f"text_completion {MODEL}")
        assert not server.parent_span_id  # a trace of its own


@pytest.mark.parametrize(
    ("headers", "share", "sent"), [(SAMPLED, 0.0, True), (NOT_SAMPLED, 1.0, False), ({}, 0.0, False), ({}, 1.0, True)]
)
def test_the_caller_s_decision_comes_before_the_share(headers: dict[str, str], share: float, sent: bool) -> None:
    with collecting() as collector:
        with traced(collector.url, sampled_share=share) as http:
            http.post(CHAT, json=chat_body(), headers=headers)
        assert bool(collector.spans) is sent


@pytest.mark.parametrize(
    "traceparent", ["", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "x" * 4000]
)
def test_an_invalid_parent_starts_a_new_trace(traceparent: str) -> None:
    with collecting() as collector:
        with traced(collector.url) as http:
            assert http.post(CHAT, json=chat_body(), headers={"traceparent": traceparent}).status_code == 200
        server = collector.named(f"chat {MODEL}")
        assert (server.trace_id.hex() == TRACE, server.parent_span_id) == (False, b"")


def test_two_parents_are_none() -> None:
    with collecting() as collector:
        with traced(collector.url) as http:
            http.post(CHAT, json=chat_body(), headers=[*SAMPLED.items(), *SAMPLED.items()])
        assert collector.named(f"chat {MODEL}").trace_id.hex() != TRACE


def test_a_failure_amid_a_stream_is_an_error_of_its_span() -> None:
    text_is_out = asyncio.Event()
    server_loop: list[asyncio.AbstractEventLoop] = []

    def script(request: Any) -> Any:
        server_loop.append(asyncio.get_running_loop())
        return answering(text_is_out, LinkClosed("the target went"))(request)

    with collecting() as collector:
        with traced(collector.url, script) as http, http.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
            events = answer.iter_lines()
            assert (answer.status_code, next(events)[:5]) == (200, "data:")
            server_loop[0].call_soon_threadsafe(text_is_out.set)
            assert "no_target" in "".join(events)
        server = collector.named(f"chat {MODEL}")
        assert server.status.code == Status.STATUS_CODE_ERROR
        assert attributes(server)["error.type"] == "no_target"
        assert attributes(server)["gen_ai.response.finish_reasons"] == ["abort"]


def test_a_refused_call_is_a_span_without_stages_and_no_error_of_the_server() -> None:
    with collecting() as collector:
        with traced(collector.url) as http:
            assert http.post(CHAT, json=chat_body(temperature="hot")).status_code == 400
        (server,) = collector.spans
        assert (server.name, server.status.code) == (f"POST {CHAT}", Status.STATUS_CODE_UNSET)
        assert attributes(server)["error.type"] == "400"


def test_spans_have_no_text() -> None:
    with collecting() as collector:
        with traced(collector.url, saying("the answer is forty-two")) as http:
            http.post(
                CHAT, json=chat_body(messages=[{"role": "user", "content": "marker-in-prompt"}], stop=["marker-in-stop"])
            )
            http.post(CHAT, json=chat_body(messages=[{"role": "marker-in-role", "content": "x"}]))
            http.post("/marker-in-path", json={})
        sent = b"".join(collector.bodies)
        assert len(collector.spans) > 4
        assert b"marker" not in sent
        assert b"forty" not in sent


def test_probes_are_not_traced() -> None:
    with collecting() as collector:
        with traced(collector.url) as http:
            assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        assert not collector.bodies


def test_without_an_endpoint_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with traced(None) as http:
            assert http.post(CHAT, json=chat_body(), headers=SAMPLED).status_code == 200
        assert not collector.bodies


@pytest.mark.parametrize("status", [400, None])
def test_a_collector_that_fails_harms_no_call(status: int | None) -> None:
    with collecting(status or 200) as collector:
        url = collector.url
        if status is not None:
            with traced(url) as http:
                assert http.post(CHAT, json=chat_body()).status_code == 200
            assert collector.bodies
    if status is None:  # its port is closed now
        with traced(url) as http:
            assert http.post(CHAT, json=chat_body()).status_code == 200


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deploy.api.tracing", "cluster.otlp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidField, match=r"observability.otlp_endpoint: needs opentelemetry.*outrider\[tracing\]"):
        check_tracing(ObservabilityConfig(otlp_endpoint="http://127.0.0.1:4318"))
    check_tracing(ObservabilityConfig())


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://host", "http://user:secret@host", "http://host/?key=secret"])
def test_an_endpoint_is_a_plain_url(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        parse(f"observability: {{otlp_endpoint: '{url}'}}", Config, "test")


def test_no_header_of_a_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector:
        with traced(collector.url) as http:
            assert http.post(CHAT, json=chat_body(), headers=SAMPLED | {"tracestate": "my words"}).status_code == 200
        assert collector.named(f"chat {MODEL}").trace_id.hex() == TRACE
    assert "my words" not in caplog.text
