"""Whose speed is compared, and how."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fixtures import Fixtures, as_request
from benchmarks.interleaved import InterleavedServer, Throughput
from benchmarks.prompts import choose_prompts
from benchmarks.throughput import NumLaps, Pair, PairedRuns, Speedup, jackknife, laps, ratio, sample
from cluster.config import DrafterConfig, NgramOptions
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from drafters.protocol import Drafter
from drafters.replay import Recording
from engine.kv_cache import BLOCK_LEN
from engine.native import NativeTarget
from engine.target import SpanInput, SpanOutcome
from tests.support.tiny_model import write_tiny_model

NGRAM = DrafterConfig(name="ngram", options=NgramOptions())


def recordings(**lens: tuple[int, ...]) -> list[Recording]:
    sampling = SamplingParams(max_tokens=64)
    return [
        Recording(f"0/{domain}-{i}", domain, (1,), (7,) * num, sampling)
        for domain, of_domain in lens.items()
        for i, num in enumerate(of_domain)
    ]


def test_a_sample_holds_all_domains_alike_whatever_the_length_of_their_answers() -> None:
    known = recordings(qa=(3, 4, 5) * 10, chat=(64,) * 50, code=(64,) * 20)
    chosen = sample(known, 6)
    assert sorted(r.domain for r in chosen) == ["chat", "chat", "code", "code", "qa", "qa"]
    assert sample(known, 6) == chosen


def test_an_answer_without_a_draft_is_not_chosen_while_there_are_others() -> None:
    known = recordings(qa=(1, 2, 9), chat=(1,))
    assert [len(r.output_token_ids) for r in sample(known, 4)] == [9]
    assert len(sample(recordings(qa=(1, 2)), 4)) == 2


def test_each_place_has_three_answers_to_measure_and_nobody_sees_an_answer_twice() -> None:
    known = recordings(qa=(9,) * 80, chat=(9,) * 80)
    found, served = laps(known, 4, 5)
    assert [(len(lap.measured), len(lap.others)) for lap in found] == [(12, 8)] * 5
    assert [sorted({r.domain for r in lap.measured}) for lap in found] == [["chat", "qa"]] * 5
    used = [r.name for r in (*served, *(r for lap in found for r in (*lap.measured, *lap.others)))]
    assert len(served) == 8
    assert len(set(used)) == len(used)


def test_of_few_answers_there_are_fewer_laps() -> None:
    def lens(num: int, batch: int) -> list[tuple[int, int]]:
        return [(len(lap.measured), len(lap.others)) for lap in laps(recordings(qa=(9,) * num), batch, 5)[0]]

    assert lens(60, 4) == [(12, 8)] * 2
    assert lens(24, 4) == [(8, 8)], "a short one"
    assert lens(24, 8) == [], "some places would be free"
    assert lens(30, 1) == [(3, 0)] * 5


def pairs(*seconds: tuple[float, float]) -> list[Pair]:
    return [Pair(Throughput(100, plain_s), Throughput(100, drafted_s)) for plain_s, drafted_s in seconds]


def test_the_speed_up_is_that_of_all_answers_together() -> None:
    """A long answer counts for more than a short one; a lap that held more tokens took longer for that."""
    short = Pair(Throughput(10, 1.0), Throughput(10, 1.0))
    assert ratio([*pairs((10.0, 5.0)), short]) == pytest.approx(11.0 / 6.0)
    assert ratio([Pair(Throughput(100, 10.0), Throughput(110, 5.5)), short]) == pytest.approx(11.0 / 6.0)


def test_the_error_is_that_of_the_choice_of_answers() -> None:
    assert jackknife(pairs((10.0, 5.0)) * 4) == pytest.approx(0.0)
    error = jackknife(pairs((10.0, 5.0), (10.0, 10.0)) * 2)
    assert error == pytest.approx(0.257, abs=0.01)  # of the seconds: 2.5 / sqrt(3) / 7.5, times the ratio 1.33
    assert jackknife(pairs((10.0, 5.0))) is None


def test_what_could_not_be_measured_has_no_speed_up(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    ngram = DrafterConfig(name="ngram", options=NgramOptions())
    fixtures = Fixtures(str(folder), [ngram], 1)
    (part,) = fixtures.record(choose_prompts((), 1), [0.0])
    for batch in (1, 16):  # a single commit; too few answers
        race = PairedRuns(fixtures, [ngram], part[0.0], batch, NumLaps(1, 1))
        while not race.is_over:
            race.step()
        race.close()
        assert race.speedups() == {}


@pytest.fixture
def fixtures(tmp_path: Path) -> Fixtures:
    return Fixtures(str(write_tiny_model(tmp_path / "target", max_position_embeddings=2048)), [NGRAM], 8)


def recorded(fixtures: Fixtures, num: int) -> list[Recording]:
    (part,) = fixtures.record(choose_prompts((), num), [0.0])
    return list(part[0.0])


@pytest.mark.parametrize("unmeasured", ["plain", "drafted"])
def test_a_lap_that_either_could_not_be_measured_in_does_not_count(
    unmeasured: str, fixtures: Fixtures, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = PairedRuns(fixtures, [NGRAM], recorded(fixtures, 12), 1, NumLaps(2, 2))

    def end(lane: InterleavedServer) -> Throughput | None:
        lane.served.cluster.abort()
        kind, seconds = ("plain", 10.0) if lane.served.drafter is None else ("drafted", 5.0)
        return None if kind == unmeasured and not found else Throughput(100, seconds)

    monkeypatch.setattr(InterleavedServer, "end", end)
    found: list[dict[str, Pair]] = []
    while not race.is_over:
        found.append(race.step())
    race.close()
    assert found == [{}, {"ngram": Pair(Throughput(100, 10.0), Throughput(100, 5.0))}]
    assert race.speedups() == {"ngram": Speedup(2.0, None, 3)}


def test_a_drafters_clock_stands_still_in_the_turns_of_others(fixtures: Fixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns from seconds how long a round takes."""
    clocks = []
    make = fixtures.make

    def made(config: DrafterConfig, clock: Callable[[], float]) -> Drafter:
        clocks.append(clock)
        return make(config, clock)

    monkeypatch.setattr(fixtures, "make", made)
    race = PairedRuns(fixtures, [NGRAM], recorded(fixtures, 9), 1, NumLaps(1, 1))
    (clock,) = clocks
    shown_s, now_s = clock(), time.monotonic()
    assert shown_s < now_s
    assert clock() == shown_s
    race.step()
    assert shown_s < clock() < shown_s + time.monotonic() - now_s
    race.close()


def test_answers_are_the_same_and_nothing_is_left(fixtures: Fixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    known = recorded(fixtures, 24)
    told: dict[str, list[int]] = {}
    end = InterleavedServer.end

    def ended(lane: InterleavedServer) -> Throughput | None:
        for r, completion in zip(lane.requests, lane.completions[: lane.num_measured], strict=False):
            told.setdefault(r.id, []).extend(completion.token_ids)
        return end(lane)

    take_turn = InterleavedServer.take_turn

    def taken(lane: InterleavedServer) -> None:
        """A turn is one round."""
        before = [len(completion.commits) for completion in lane.completions]
        take_turn(lane)
        for number, completion in enumerate(lane.completions):
            assert len(completion.commits) <= 1 + (before[number] if number < len(before) else 0)

    monkeypatch.setattr(InterleavedServer, "end", ended)
    monkeypatch.setattr(InterleavedServer, "take_turn", taken)
    race = PairedRuns(fixtures, [NGRAM], known, 2, NumLaps(2, 2))
    while not race.is_over:
        assert set(race.step()) == {"ngram"}
    race.close()
    expected = {as_request(r).id: list(r.output_token_ids) for r in known}
    for request_id, token_ids in told.items():
        assert token_ids in (expected[request_id], 2 * expected[request_id])  # served before, or by both
    for engine in (fixtures.plain, fixtures.baseline):
        assert engine.capacity().num_free_blocks == engine.capacity().num_blocks
        engine.check_integrity()


def test_prompts_are_computed_once_for_all_who_race(fixtures: Fixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [DrafterConfig(name=name, options=NgramOptions()) for name in ("a", "b")]
    unknown = [replace(recording, prompt_token_ids=recording.prompt_token_ids[::-1]) for recording in recorded(fixtures, 24)]
    race = PairedRuns(fixtures, configs, unknown, 2, NumLaps(2, 2))
    num_computed: list[int] = []
    cache_prompts = fixtures.cache_prompts

    def counting(execute: Callable[[Sequence[SpanInput]], list[SpanOutcome]]) -> Callable[..., list[SpanOutcome]]:
        def counted(spans: Sequence[SpanInput]) -> list[SpanOutcome]:
            num_computed.extend(
                len(span.token_ids) for span in spans if not span.samples or len(span.token_ids) > 1 + span.num_drafts
            )
            return execute(spans)

        return counted

    def cached(engine: NativeTarget, requests: Sequence[Request]) -> None:
        cache_prompts(engine, requests)
        assert max(num_computed) > BLOCK_LEN
        num_computed.clear()

    for engine in (fixtures.plain, fixtures.baseline):
        monkeypatch.setattr(engine, "execute", counting(engine.execute))
    monkeypatch.setattr(fixtures, "cache_prompts", cached)
    while not race.is_over:
        race.step()
        assert num_computed
        assert max(num_computed) <= BLOCK_LEN
    race.close()
    assert {name: speedup.num_answers for name, speedup in race.speedups().items()} == {"a": 12, "b": 12}
