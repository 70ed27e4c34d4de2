"""Whose speed is compared, and how."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DrafterConfig, DSparkOptions, NgramOptions
from cluster.errors import GenerationFailed
from cluster.types import Commit, Request, SamplingParams
from deploy.bench.pace import (
    MAX_PLAIN_RUNS,
    NUM_PLAIN_RUNS,
    Pace,
    Race,
    Turns,
    fastest_agree,
    in_turn,
    jackknife,
    laps,
    measured,
    near_best,
    pace_of,
    plain_pace,
    ratio,
    sample,
)
from deploy.bench.stable import Stable
from deploy.embedded import Completion
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand, Draft
from drafters.replay import Recording
from engine.kv_cache import BLOCK_LEN
from engine.native import NativeTarget
from engine.target import SpanInput, SpanOutcome
from profiler.prompts import choose_prompts
from tests.support.dspark import write_dspark
from tests.support.tiny_model import write_tiny_model


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


def completion(start_s: float, *lens: int) -> Completion:
    """A commit a second."""
    commits = [Commit("r", 0, (7,) * num) for num in lens]
    return Completion([], commits, [start_s + i for i in range(len(lens))])


def test_a_lap_is_measured_until_its_last_answer_ends() -> None:
    """The second takes the first's place; of the last, which is only company, counts what came until then."""
    completions = [completion(0.0, 1, 2), completion(0.5, 1, 1), completion(2.0, 1, 3, 3), completion(2.5, 1, 5, 9, 9)]
    assert pace_of(completions, 2, 3) == Pace(2 + 1 + (1 + 3 + 3) + (1 + 5), 4.0 - 0.5)


def test_answers_that_end_with_their_first_commit_are_not_measured() -> None:
    assert pace_of([completion(0.0, 1), completion(0.0, 1)], 2, 2) is None
    assert pace_of([], 2, 0) is None


def test_the_speed_up_is_that_of_all_answers_together() -> None:
    """A long answer counts for more than a short one; a lap that held more tokens took longer for that."""
    plain = [Pace(100, 10.0), Pace(10, 1.0)]
    assert ratio(measured(plain, [Pace(100, 5.0), Pace(10, 1.0)])) == pytest.approx(11.0 / 6.0)
    assert ratio(measured(plain, [Pace(110, 5.5), Pace(10, 1.0)])) == pytest.approx(11.0 / 6.0)


def test_a_lap_that_either_could_not_be_measured_in_does_not_count() -> None:
    plain = [Pace(100, 10.0), None, Pace(10, 1.0)]
    assert measured(plain, [Pace(100, 5.0), Pace(9, 3.0)]) == [(plain[0], Pace(100, 5.0))]
    assert measured(plain, [None, None]) == []


def test_the_error_is_that_of_the_choice_of_answers() -> None:
    plain = [Pace(100, 10.0)] * 4
    assert jackknife(measured(plain, [Pace(100, 5.0)] * 4)) == pytest.approx(0.0)
    error = jackknife(measured(plain, [Pace(100, 5.0), Pace(100, 10.0)] * 2))
    assert error == pytest.approx(0.257, abs=0.01)  # of the seconds: 2.5 / sqrt(3) / 7.5, times the ratio 1.33
    assert jackknife(measured(plain[:1], [Pace(100, 5.0)])) is None


def test_everybody_has_a_turn_and_plain_three_in_an_order_that_changes() -> None:
    orders = [in_turn(["a", "b", "c", "d"], number) for number in range(6)]
    assert all(sorted(order, key=str) == [None, None, None, "a", "b", "c", "d"] for order in orders)
    assert len({order[0] for order in orders}) >= 4, "nobody is always the first"
    assert orders[0] == [None, "a", None, "b", None, "c", "d"]


SLOW, USUAL, QUICK = Pace(100, 20.0), Pace(110, 11.0), Pace(200, 19.0)


def test_of_plain_runs_that_were_disturbed_in_part_one_counts_that_was_not() -> None:
    assert plain_pace([SLOW, USUAL, QUICK]) == USUAL
    assert plain_pace([SLOW, Pace(100, 30.0), QUICK, SLOW, USUAL]) == USUAL
    assert plain_pace([SLOW, USUAL, SLOW]) == USUAL, "the only one"
    assert plain_pace([USUAL, None, QUICK]) is None
    assert plain_pace([]) is None


def test_plain_runs_agree_when_the_two_fastest_do() -> None:
    assert fastest_agree([SLOW, USUAL, QUICK])
    assert not fastest_agree([SLOW, USUAL, SLOW])
    assert not fastest_agree([USUAL])


def test_those_near_the_best_are_measured_on() -> None:
    assert near_best({"a": 1.8, "b": 1.55, "c": 1.5, "d": 0.6}) == ["a", "b"]
    assert near_best({"a": 0.7}) == ["a"]
    assert near_best({}) == []


def test_what_could_not_be_measured_has_no_speed_up(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    ngram = DrafterConfig(name="ngram", options=NgramOptions())
    stable = Stable(str(folder), [ngram], 1)
    (part,) = stable.record(choose_prompts((), 1), [0.0])
    for batch in (1, 16):  # a single commit; too few answers
        race = Race(stable, [ngram], part[0.0], batch, Turns(1, 1))
        while not race.is_over:
            race.step()
        race.close()
        assert race.speedups() == {}


@pytest.mark.parametrize(
    ("plain_s", "num_runs", "expected"),
    [
        ((10.0, 10.5, 25.0), NUM_PLAIN_RUNS, 10.5),
        ((10.0, 20.0, 25.0, 19.0, 10.5), 5, 10.5),
        ((10.0, 20.0, 25.0, 19.0, 18.0, 22.0, 16.0), MAX_PLAIN_RUNS, 10.0),
    ],
)
def test_plain_runs_are_repeated_until_two_agree_and_then_it_is_enough(
    plain_s: Sequence[float], num_runs: int, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter runs after the first three, and takes 5 seconds."""
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    ngram = DrafterConfig(name="ngram", options=NgramOptions())
    stable = Stable(str(folder), [ngram], 8)
    (part,) = stable.record(choose_prompts((), 9), [0.0])
    race = Race(stable, [ngram], part[0.0], 1, Turns(1, 1))
    runs = iter((*plain_s[:NUM_PLAIN_RUNS], 5.0, *plain_s[NUM_PLAIN_RUNS:]))
    monkeypatch.setattr("deploy.bench.pace._Served.measure", lambda *_: Pace(100, next(runs)))
    paces = race.step()
    race.close()
    assert [pace.seconds for pace in paces if pace is not None] == list(plain_s[:num_runs])
    assert race.speedups()["ngram"].value == expected / 5.0


class _Failing(NgramDrafter):
    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        raise FloatingPointError("no draft")


def test_a_drafter_that_fails_is_not_measured_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    ngram = DrafterConfig(name="ngram", options=NgramOptions())
    stable = Stable(str(folder), [ngram], 8)
    (part,) = stable.record(choose_prompts((), 9), [0.0])
    monkeypatch.setattr(stable, "make", lambda *_: _Failing())
    with pytest.raises(GenerationFailed, match="the drafter failed"):
        Race(stable, [ngram], part[0.0], 1, Turns(1, 1))


def test_prompts_are_computed_once_for_all_who_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    configs = [DrafterConfig(name=name, options=NgramOptions()) for name in ("a", "b")]
    stable = Stable(str(folder), configs, 8)
    (part,) = stable.record(choose_prompts((), 24), [0.0])
    unknown = [replace(recording, prompt_token_ids=recording.prompt_token_ids[::-1]) for recording in part[0.0]]
    race = Race(stable, configs, unknown, 2, Turns(2, 2))
    num_computed: list[int] = []
    execute, cache_prompts = stable.plain.execute, stable.cache_prompts

    def counted(spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        num_computed.extend(len(span.token_ids) for span in spans if not span.is_decode)
        return execute(spans)

    def cached(engine: NativeTarget, requests: Sequence[Request]) -> None:
        cache_prompts(engine, requests)
        assert max(num_computed) > BLOCK_LEN
        num_computed.clear()

    monkeypatch.setattr(stable.plain, "execute", counted)
    monkeypatch.setattr(stable, "cache_prompts", cached)
    while not race.is_over:
        race.step()
        assert num_computed
        assert max(num_computed) <= BLOCK_LEN
    race.close()
    assert {name: speedup.num_answers for name, speedup in race.speedups().items()} == {"a": 12, "b": 12}


def test_only_who_reads_the_targets_features_races_on_a_target_that_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping them takes time, which is not the others'."""
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    path = write_dspark(tmp_path / "dspark", folder)
    dspark = DrafterConfig(name="dspark", options=DSparkOptions(path=str(path)))
    ngram = DrafterConfig(name="ngram", options=NgramOptions())
    stable = Stable(str(folder), [ngram, dspark], 8)
    (part,) = stable.record(choose_prompts((), 3), [0.0])
    passes: list[int] = []
    execute = stable.target.execute

    def counted(spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        passes.append(len(spans))
        return execute(spans)

    monkeypatch.setattr(stable.target, "execute", counted)
    num_passes = {}
    for config in (ngram, dspark):
        passes.clear()
        race = Race(stable, [config], part[0.0], 1, Turns(1, 1))
        race.step()
        race.close()
        num_passes[config.name] = len(passes)
    assert num_passes["ngram"] == 0
    assert num_passes["dspark"] > 0
