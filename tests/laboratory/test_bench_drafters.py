"""What the comparison of drafters reports."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import drafters as bench
from benchmarks import equal_drafters
from benchmarks.drafters import QUICK, Findings
from benchmarks.pool import pool
from benchmarks.report import BenchOptions
from benchmarks.rounds import conditional_acceptance, confidence_figures, mean_accepted_len
from drafters.replay import Round
from tests.support.dspark import write_dspark
from tests.support.tiny_model import ship, write_tiny_layers, write_tiny_model
from tests.support.word_model import write_wordy_model


def rounds_of(*accepted: int, drafted: int = 3, confidence: float = 0.5) -> list[Round]:
    return [Round("d", (confidence,) * drafted, num, num + 1) for num in accepted]


def test_acceptance_is_conditional_on_what_stands_before() -> None:
    rounds = [*rounds_of(0, 1, 3), Round("d", (), 0, 1)]
    assert conditional_acceptance(rounds, 4) == [pytest.approx(2 / 3), 0.5, 1.0, None]
    assert mean_accepted_len(rounds) == pytest.approx((1 + 2 + 4 + 1) / 4)


def test_confidences_that_come_true_have_no_error() -> None:
    rounds = rounds_of(*[1, 0] * 50, drafted=1)
    figures = confidence_figures(rounds)
    assert figures["ece"] == pytest.approx(0.0)
    assert figures["ece_floor"] == pytest.approx(0.04, abs=0.001), "of 100 tosses of a coin"
    assert figures["brier"] == pytest.approx(0.25)
    assert figures["auroc_by_position"] == pytest.approx(0.5)
    assert figures["auroc"] == pytest.approx(0.5)
    assert confidence_figures([Round("d", (), 0, 1)]) == {}


def findings(accepted: tuple[int, ...], cost: float) -> Findings:
    rounds = {(t, k): rounds_of(*accepted, drafted=k) for t in bench.TEMPERATURES for k in bench.DRAFT_LENS}
    rounds[0.8, 4] = rounds_of(0)
    return Findings(rounds, {k: cost * k for k in bench.DRAFT_LENS})


def test_figures_say_what_was_found() -> None:
    found = {"a": findings((0, 3, 6), 0.02), "b": findings((1,), 0.01)}
    figures = bench.result(found, 3, 8).figures
    expected = {
        **{f"accepted_len.a.k{k}.{mean}": 4.0 for k in (7, 4) for mean in ("mean", "mean.t0.8")},
        **{f"accepted_len.b.k{k}.{mean}": 2.0 for k in (7, 4) for mean in ("mean", "mean.t0.8")},
        "accepted_len.a.k4.mean.t0.8": 1.0,
        "accepted_len.b.k4.mean.t0.8": 1.0,
        "accepted_len.a.k7.d": 4.0,
        "accepted_len.b.k7.d": 2.0,
        "draft_cost.a.k7": pytest.approx(0.14),
        "draft_cost.a.k4": pytest.approx(0.08),
        "draft_cost.b.k7": pytest.approx(0.07),
        "draft_cost.b.k4": pytest.approx(0.04),
    }
    assert {key: figures[key] for key in expected} == expected


def test_acceptance_by_position_is_told_for_each_temperature_and_domain() -> None:
    of_a = findings((0, 3, 6), 0.02)
    of_a.rounds[0.8, 7] = [*rounds_of(1, 0, drafted=2), Round("e", (0.5,), 1, 2)]
    result = bench.result({"a": of_a}, 3, 8)
    by_position = {key: value for key, value in result.figures.items() if key.startswith("acceptance.")}
    greedy = (2 / 3, 1.0, 1.0, 1 / 2, 1.0, 1.0, 0.0)
    assert by_position == {
        **{f"acceptance.a.position_{i}": pytest.approx(share) for i, share in enumerate(greedy, start=1)},
        "acceptance.a.position_1.t0.8": pytest.approx(2 / 3),
        "acceptance.a.position_2.t0.8": 0.0,
    }
    tables = {table.title: table.rows for table in result.tables}
    assert tables["conditional acceptance by position, K = 7, temperature 0.8"] == (
        ("a", pytest.approx(5 / 3), pytest.approx(2 / 3), 0.0, "-", "-", "-", "-", "-"),
    )
    assert tables["the same by domain, K = 7, temperature 0.8"] == (
        ("a", "d", 0.5, 0.0, "-", "-", "-", "-", "-"),
        ("a", "e", 1.0, "-", "-", "-", "-", "-", "-"),
    )


def test_confidences_that_tell_nothing_but_the_position_rank_nothing() -> None:
    """Though short prefixes survive more often, which they say: that is what is pooled over positions."""
    figures = confidence_figures(rounds_of(*[0, 1, 2, 3] * 50, drafted=3, confidence=0.7))
    assert figures["auroc_by_position"] == 0.5
    assert figures["auroc"] > 0.6


def test_a_drafter_without_enough_drafts_has_no_confidence_figures() -> None:
    assert confidence_figures(rounds_of(1, 0, drafted=1)) == {}


def test_the_pool_holds_what_is_shipped_and_combinations_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_tiny_model(tmp_path / "target")
    ship(monkeypatch, tmp_path / "shipped", target)
    assert [config.name for config in pool(str(target))] == ["ngram", "suffix", "table", "cascade"]
    write_tiny_layers(tmp_path / "shipped" / "layers-2", target, range(200))
    configs = {config.name: config for config in pool(str(target))}
    assert list(configs) == ["ngram", "suffix", "table", "layers-2", "cascade"]
    assert configs["cascade"].has_model
    assert not configs["table"].has_model
    assert [config.name for config in pool("another")] == ["ngram", "suffix", "table", "cascade"]


def test_everything_is_measured_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    ship(monkeypatch, tmp_path / "shipped", target)
    write_tiny_layers(tmp_path / "shipped" / "layers-2", target, range(257))
    write_dspark(tmp_path / "shipped" / "dspark", target, block_size=5)
    monkeypatch.setattr(bench, "QUICK", replace(QUICK, num_new_tokens=8, num_cost_rounds=2))
    monkeypatch.chdir(tmp_path)  # of drafters of equal budget
    result = bench.run(BenchOptions(quick=True, model=str(target)))
    figures = result.figures
    names = ("ngram", "suffix", "table", "dspark", "layers-2", "cascade", *equal_drafters.NAMES)
    for name in names:
        assert {f"accepted_len.{name}.k{k}.mean{at}" for k in (4, 7) for at in ("", ".t0.8")} <= figures.keys()
        assert {f"draft_cost.{name}.k4", f"draft_cost.{name}.k7"} <= figures.keys()
    domains = {key.split(".")[3] for key in figures if key.startswith("accepted_len.dspark.k7.")}
    assert {"mean", "code", "prose", "copying"} <= domains
    assert figures["accepted_len.layers-2.k7.mean"] > 1.45, "the first token is always right: it is the model itself"
    assert figures["accepted_len.dspark.k7.mean"] < 1.3, "its weights are random"
    assert result.to_json()
    assert "drafters: 0:" in capsys.readouterr().err, "it says how far it is"


def test_drafters_of_one_budget_are_trained_once_from_the_same_answers(tmp_path: Path) -> None:
    model = write_wordy_model(tmp_path / "model")
    small = {"num_prompts": 24, "num_tokens": 600, "max_answer_tokens": 24, "num_epochs": 1, "block_size": 4}
    sizes = {"vocabulary": 200, "markov_rank": 8, "anchor_rank": 16, "dtype": "float32"}
    options = replace(equal_drafters.recipe(str(model), tmp_path), **small, **sizes)
    told: list[str] = []
    assert not equal_drafters.is_trained(tmp_path)
    found = equal_drafters.trained(options, told.append)
    assert [config.name for config in found] == [*equal_drafters.NAMES]
    assert [config.options.kind for config in found] == list(equal_drafters.KINDS)
    assert sum(line.startswith("answers") for line in told) == len(found), "of the second and third, all are there"
    told.clear()
    assert equal_drafters.trained(options, told.append) == found
    assert told == [], "none is trained anew"
    of_quick = equal_drafters.recipe(str(model), tmp_path, quick=True)
    assert (of_quick.out, of_quick.quick) == (options.out, False), "those of the whole budget are there"
    figures = bench.result({config.name: findings((1, 2), 0.1) for config in found}, 3, 8)
    assert figures.tables[-1].rows[0][0] == "eagle3"
    assert figures.figures["accepted_len.eagle3.k7.d"] == 2.5
