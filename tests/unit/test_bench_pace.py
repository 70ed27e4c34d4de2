"""Whose speed is compared, and how."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.config import DrafterConfig, DSparkOptions, NgramOptions
from cluster.types import SamplingParams
from deploy.bench.pace import Pace, Race, Turns, in_batches, in_turn, jackknife, measured, near_best, ratio, sample
from deploy.bench.stable import Stable
from drafters.replay import Recording
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
    chosen, served = sample(known, 6, 8)
    assert sorted(r.domain for r in chosen) == ["chat", "chat", "code", "code", "qa", "qa"]
    assert len(served) == 8
    assert not {r.name for r in chosen} & {r.name for r in served}, "nobody has seen what is measured"
    assert sample(known, 6, 8) == (chosen, served)


def test_an_answer_without_a_draft_is_not_chosen_while_there_are_others() -> None:
    known = recordings(qa=(1, 2, 9), chat=(1,))
    assert [len(r.output_token_ids) for r in sample(known, 4)[0]] == [9]
    assert len(sample(recordings(qa=(1, 2)), 4)[0]) == 2


def test_a_batch_holds_answers_of_like_lengths() -> None:
    batches = in_batches(recordings(qa=(9, 3, 64, 8, 4, 60)), 2)
    assert [[len(r.output_token_ids) for r in batch] for batch in batches] == [[3, 4], [8, 9], [60, 64]]


def test_the_speed_up_is_that_of_all_answers_together() -> None:
    """A long answer counts for more than a short one; a window that held more tokens took longer for that."""
    plain = [Pace(100, 10.0), Pace(10, 1.0)]
    assert ratio(measured(plain, [Pace(100, 5.0), Pace(10, 1.0)])) == pytest.approx(11.0 / 6.0)
    assert ratio(measured(plain, [Pace(110, 5.5), Pace(10, 1.0)])) == pytest.approx(11.0 / 6.0)


def test_a_batch_that_either_could_not_be_measured_in_does_not_count() -> None:
    plain = [Pace(100, 10.0), None, Pace(10, 1.0)]
    assert measured(plain, [Pace(100, 5.0), Pace(9, 3.0)]) == [(plain[0], Pace(100, 5.0))]
    assert measured(plain, [None, None]) == []


def test_the_error_is_that_of_the_choice_of_answers() -> None:
    plain = [Pace(100, 10.0)] * 4
    assert jackknife(measured(plain, [Pace(100, 5.0)] * 4)) == pytest.approx(0.0)
    error = jackknife(measured(plain, [Pace(100, 5.0), Pace(100, 10.0)] * 2))
    assert error == pytest.approx(0.257, abs=0.01)  # of the seconds: 2.5 / sqrt(3) / 7.5, times the ratio 1.33
    assert jackknife(measured(plain[:1], [Pace(100, 5.0)])) is None


def test_everybody_has_a_turn_and_plain_two_in_an_order_that_changes() -> None:
    orders = [in_turn(["a", "b", "c", "d"], number) for number in range(6)]
    assert all(sorted(order, key=str) == [None, None, "a", "b", "c", "d"] for order in orders)
    assert len({order[0] for order in orders}) >= 4, "nobody is always the first"
    assert orders[0] == [None, "a", "b", None, "c", "d"]


def test_those_near_the_best_are_measured_on() -> None:
    assert near_best({"a": 1.8, "b": 1.55, "c": 1.5, "d": 0.6}) == ["a", "b"]
    assert near_best({"a": 0.7}) == ["a"]
    assert near_best({}) == []


def test_a_batch_of_answers_that_end_with_their_first_commit_is_not_measured(tmp_path: Path) -> None:
    """Nobody was decoding while all were."""
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    ngram = DrafterConfig(name="ngram", options=NgramOptions())
    stable = Stable(str(folder), [ngram], 1)
    (part,) = stable.record(choose_prompts((), 3), [0.0])
    race = Race(stable, [ngram], part[0.0], 1, Turns(1, 1, 8))
    race.step()
    race.close()
    assert race.speedups() == {}
    assert race.is_over


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
        race = Race(stable, [config], part[0.0], 1, Turns(1, 1, 8))
        race.step()
        race.close()
        num_passes[config.name] = len(passes)
    assert num_passes["ngram"] == 0
    assert num_passes["dspark"] > 0
