"""`outrider bench trace` against a real HTTP server over a scripted cluster."""

import asyncio
import gzip
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import conversations, trace
from benchmarks.load import BenchFailed, TimedAnswer
from benchmarks.replay import Chat, Endpoint, Outcome, replay
from benchmarks.report import BenchOptions, TraceOptions
from cluster.errors import InvalidField
from cluster.types import Request
from simulator.study import plot
from tests.support.api import MODEL, app_of, listening, model_info, saying
from tests.support.scripted import ScriptedClient, Step

DEADLINE_S = 60.0  # a test ends long before


def _cluster(script: Callable[[Request], Iterable[Step]]) -> ScriptedClient:
    return ScriptedClient(model_info(), script)


def _replay(
    cluster: ScriptedClient, num: int, *, max_under_way: int = 8, deadline_s: float = DEADLINE_S, max_concurrent: int = 8
) -> list[Outcome]:
    chats = [Chat(0.0, "chat", f"question {i}", 20) for i in range(num)]
    with listening(app_of(cluster, max_concurrent=max_concurrent, max_queued=0)) as url:
        endpoint = Endpoint.parse(url, None)
        return asyncio.run(replay(endpoint, MODEL, chats, max_under_way=max_under_way, deadline_s=deadline_s))


def _waiting_for(num: int, cluster: list[ScriptedClient]) -> Callable[[Request], Iterable[Step]]:
    """Nobody is answered before ``num`` have arrived."""
    event = asyncio.Event()

    def script(request: Request) -> Iterable[Step]:
        if len(cluster[0].requests) >= num:
            event.set()
        yield event
        yield from saying("the answer")(request)

    return script


def test_arrivals_do_not_wait_for_answers() -> None:
    clusters: list[ScriptedClient] = []
    clusters.append(_cluster(_waiting_for(4, clusters)))
    outcomes = _replay(clusters[0], 4)
    assert [outcome.answer.error for outcome in outcomes] == [None] * 4
    assert {outcome.answer.text for outcome in outcomes} == {"the answer"}
    assert all(outcome.answer.num_tokens > 1 and outcome.ttft_s <= outcome.e2e_s for outcome in outcomes)
    assert not any(outcome.was_held for outcome in outcomes)


def test_a_bound_on_open_requests_is_told_as_lateness() -> None:
    outcomes = _replay(_cluster(saying("the answer")), 3, max_under_way=1)
    assert [outcome.was_held for outcome in outcomes] == [False, True, True]
    first, second, third = outcomes
    assert second.late_s >= first.e2e_s
    assert third.ttft_s > third.late_s >= second.e2e_s


def test_an_answer_that_does_not_come_is_lost_at_its_deadline() -> None:
    def script(request: Request) -> Iterable[Step]:
        yield asyncio.Event()

    outcomes = _replay(_cluster(script), 2, max_under_way=1, deadline_s=0.5)
    figures = trace.result_of(outcomes, TraceOptions()).figures
    assert (figures["num_lost"], figures["num_errors"], figures["slo_attainment"]) == (2, 0, 0.0)
    assert "ttft_ms.p50" not in figures
    plotted = trace.panels(outcomes, TraceOptions())
    assert all(len(panel.series) >= 1 for panel in plotted)


def test_refusals_are_errors_of_the_server() -> None:
    outcomes = _replay(_cluster(lambda request: [asyncio.Event()]), 3, max_concurrent=1, deadline_s=2.0)
    figures = trace.result_of(outcomes, TraceOptions()).figures
    assert (figures["num_errors"], figures["num_refused"], figures["num_lost"]) == (2, 2, 1)


def _outcome(ttft_s: float, tpot_s: float, *, late_s: float = 0.0, domain: str = "chat") -> Outcome:
    answer = TimedAnswer(100.0 + late_s, [ttft_s, ttft_s + 10 * tpot_s], "words", 11)
    return Outcome(Chat(0.0, domain, "", 11), late_s, late_s > 0, late_s + answer.pieces_s[-1], answer)


def test_goodput_counts_requests_within_both_objectives_from_their_arrival() -> None:
    lost = Outcome(Chat(0.0, "code", "", 9), 0.0, False, 5.0, TimedAnswer(100.0, error="no answer", is_lost=True))
    outcomes = [_outcome(0.5, 0.05), _outcome(0.5, 0.2), _outcome(0.5, 0.05, late_s=0.6), _outcome(0.9, 0.09), lost]
    result = trace.result_of(outcomes, TraceOptions(ttft_ms=1000, tpot_ms=100))
    assert result.figures["slo_attainment"] == pytest.approx(2 / 5)
    assert result.figures["goodput_tokens_per_s"] == pytest.approx(22 / 5.0)
    assert result.figures["tokens_per_s"] == pytest.approx(44 / 5.0)
    assert result.figures["ttft_ms.p99"] == pytest.approx(1100.0)
    assert result.figures["tpot_ms.p50"] == pytest.approx(90.0)
    assert result.figures["num_held"] == 1
    assert [row[:2] for row in result.tables[0].rows] == [("chat", 4), ("code", 1)]
    assert "1 failed: no answer" in result.notes


def test_a_trace_gives_arrivals_and_lengths_within_the_bound(tmp_path: Path) -> None:
    file = tmp_path / "some.csv.gz"
    with gzip.open(file, "wt") as out:
        out.write("arrival_s,prompt_tokens,output_tokens\n")
        out.writelines(f"{i},5,{i % 40 + 1}\n" for i in range(1000))
    chats = trace.chats_of(BenchOptions(trace=TraceOptions(file=file, rate=4.0, max_tokens=20)), 10.0)
    assert len(chats) == 40
    assert chats[0].arrival_s == 0.0
    assert chats[-1].arrival_s == pytest.approx(10.0)
    assert {chat.max_tokens for chat in chats} == set(range(1, 21))
    assert len({chat.domain for chat in chats}) > 1


def test_the_command_asks_with_the_key_and_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    keys.chmod(0o600)
    monkeypatch.setattr(trace, "QUICK_S", 1.0)
    picture, prompts = tmp_path / "trace.png", tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "1", "domain": "chat", "prompt": "what is it?"}\n')
    with listening(app_of(_cluster(saying("the answer")), api_keys_file=keys)) as url:
        to_url = TraceOptions(url=f"{url}/v1", rate=8.0, plot=picture)
        options = BenchOptions(quick=True, prompts=(prompts,), model=MODEL, trace=to_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
        result = trace.run(options)
        with pytest.raises(InvalidField, match=f"there are: {MODEL}"):
            trace.run(replace(options, model="other"))
        monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
        with pytest.raises(InvalidField, match="401"):
            trace.run(options)
    assert result.figures["num_requests"] == 8
    assert result.figures["num_errors"] == result.figures["num_lost"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_first_request_that_fails_ends_it(tmp_path: Path) -> None:
    cluster = _cluster(lambda request: [ValueError("broken")])
    with listening(app_of(cluster)) as url:
        options = TraceOptions(url=url, plot=tmp_path / "trace.png")
        with pytest.raises(BenchFailed, match="first request"):
            trace.run(BenchOptions(quick=True, model=MODEL, trace=options))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://host:many", "http://"])
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(InvalidField, match="--url"):
        Endpoint.parse(url, None)


def test_addresses_and_keys() -> None:
    endpoint = Endpoint.parse("https://host/openai/v1/", "sk-secret")
    assert (endpoint.host, endpoint.port, endpoint.path, endpoint.tls) == ("host", 443, "/openai/v1", True)
    assert "sk-secret" not in repr(endpoint)
    assert Endpoint.parse("http://host:81", None).path == "/v1"


def test_panels_can_be_drawn(tmp_path: Path) -> None:
    outcomes = [_outcome(0.5, 0.05), _outcome(0.7, 0.2, domain="code")]
    plotted = trace.panels(outcomes, TraceOptions())
    plot(plotted, "measured", tmp_path / "trace.png")
    assert max(plotted[3].series["requests"][1]) == 2
    assert plotted[5].series["attainment"][1] == [1.0, 0.0]


def test_requests_of_one_rounded_moment_are_spread_until_the_next() -> None:
    assert trace.spread_ties([1.0, 1.0, 2.0, 9.0, 9.0, 9.0]) == [1.0, 1.5, 2.0, 9.0, 10.0, 11.0]


def test_recorded_conversations_share_more_than_what_all_share() -> None:
    turns = conversations.read_turns(conversations.RECORDED)
    by_conversation: dict[int, list[conversations.Turn]] = {}
    for turn in turns:
        by_conversation.setdefault(turn.conversation, []).append(turn)
    assert len(turns) == 256
    for one in by_conversation.values():
        assert len(one) > 1
        shared = set.intersection(*(set(turn.blocks[conversations.SHARED_BY_ALL :]) for turn in one[:2]))
        assert shared


@pytest.mark.parametrize(
    "text", ['{"hash_ids": [1]}', "arrival_s,prompt_tokens", '{"hash_ids": [1, 2], "output_length": 3}']
)
def test_a_trace_without_conversations_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(InvalidField, match="trace"):
        conversations.read_turns(path)


def test_hits_and_balance_are_those_of_both_arms() -> None:
    by_prefix = conversations.Played(100, 60, (30, 50), (0.1, 0.2, 0.3)).plus(
        conversations.Played(100, 60, (30, 10), (0.1,))
    )
    by_load = conversations.Played(200, 40, (100, 100), (0.4,) * 4)
    figures = conversations.result_of({"prefix": by_prefix, "least_loaded": by_load}).figures
    assert figures["prefix_hits_over_least_loaded"] == 3
    assert figures["balance"] == 1
    assert figures["ttft_over_least_loaded"] == pytest.approx(0.5)
    assert figures["hit_rate.least_loaded"] == pytest.approx(0.2)
