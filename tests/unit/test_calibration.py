"""Whether calibrated confidences can be counted on, offline and online."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.errors import ModelUnavailable
from profiler.calibration import (
    FILE,
    Calibration,
    Quality,
    Records,
    TemperatureScaling,
    fit_by_grid,
    fit_temperatures,
    load_calibration,
    log_margins,
    quality,
    save_calibration,
)
from profiler.reliability import auroc, calibrated_error, expected_calibration_error, plot_reliability
from router.estimates.confidence_scaling import OnlineScaling
from router.estimates.survival import OnlineSurvival

Floats = NDArray[np.float64]
K = 7


def drafts(num: int, boast: float, seed: int = 0) -> Records:
    """True conditional probabilities, told ``boast`` times as surely on the logit scale; every token is verified."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 1.2, (num, K))
    right = rng.random((num, K)) < 1 / (1 + np.exp(-logits))
    num_accepted = np.cumprod(right, axis=1).sum(1)
    return Records(1 / (1 + np.exp(-boast * logits)), np.full(num, K), num_accepted)


def worst_ece(survival: Floats, records: Records) -> float:
    return max(expected_calibration_error(survival[:, k], records.survived(k)) for k in range(K))


def as_list(records: Records) -> list[tuple[tuple[float, ...], int]]:
    return [(tuple(row), int(num)) for row, num in zip(records.confidences.tolist(), records.num_accepted, strict=True)]


@pytest.mark.parametrize("fit", [fit_temperatures, fit_by_grid])
@pytest.mark.parametrize("boast", [2.0, 0.5])
def test_survival_can_be_counted_on_after_fitting_on_other_drafts(fit: type, boast: float) -> None:
    test = drafts(20_000, boast, seed=1)
    assert worst_ece(np.cumprod(test.confidences, axis=1), test) > 0.04
    scaling: TemperatureScaling = fit(drafts(10_000, boast))
    assert worst_ece(scaling.survival(test.confidences), test) < 0.02


def test_temperatures_are_found_again() -> None:
    found = fit_temperatures(drafts(20_000, 2.0)).temperatures
    assert len(found) == K
    assert found[0] == pytest.approx(2.0, rel=0.15)
    assert found[1] == pytest.approx(2.0, rel=0.2)


def test_what_was_fitted_needs_no_fitting() -> None:
    records = drafts(20_000, 2.0)
    survival = fit_temperatures(records).survival(records.confidences)
    conditional = np.concatenate([survival[:, :1], survival[:, 1:] / survival[:, :-1]], axis=1)
    again = fit_temperatures(Records(conditional, records.num_verified, records.num_accepted))
    np.testing.assert_allclose(again.temperatures, 1.0, atol=0.05)
    np.testing.assert_allclose(again.offsets, 0.0, atol=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_honest_drafts_of_which_few_survive_are_left_as_they_are(seed: int) -> None:
    """At a mean acceptance of 0.4 about twenty of twelve thousand drafts come to the last position."""
    rng = np.random.default_rng(seed)
    told = 1 / (1 + np.exp(-rng.normal(-0.5, 1.2, (12_000, K))))
    num_accepted = np.cumprod(rng.random(told.shape) < told, axis=1).sum(1)
    records = Records(told, np.full(len(told), K), num_accepted)
    assert 0.35 < records.survived(0).mean() < 0.45
    found = fit_temperatures(records)
    assert len(found.temperatures) < K, "too few come so far"
    assert all(0.8 < t < 1.25 for t in found.temperatures)
    assert all(abs(offset) < 0.15 for offset in found.offsets)


def test_confidences_that_are_too_high_throughout_are_lowered() -> None:
    """What no temperature does: at a confidence of one half it changes nothing."""
    found = fit_temperatures(shifted(drafts(10_000, 1.0), 0.6))
    assert found.offsets == pytest.approx((-0.6,) * K, abs=0.2)
    assert found.temperatures == pytest.approx((1.0,) * K, abs=0.2)
    test = shifted(drafts(20_000, 1.0, seed=1), 0.6)
    assert worst_ece(np.cumprod(test.confidences, axis=1), test) > 0.1
    assert worst_ece(found.survival(test.confidences), test) < 0.02


def test_quality_is_a_mean_over_positions() -> None:
    test = drafts(5_000, 2.0)
    survival = np.cumprod(test.confidences, axis=1)
    errors = [expected_calibration_error(survival[:, k], test.survived(k)) for k in range(K)]
    found = quality(survival, test)
    assert found.ece == pytest.approx(np.mean(errors))
    assert found.auroc is not None
    assert 0.7 < found.auroc < 0.95
    assert quality(np.zeros((0, 0)), Records.of([])) == Quality(None, None)
    blind = Records.of([((0.9, 0.5, 0.1), 0), ((0.9, 0.5, 0.1), 3)] * 100)
    assert quality(np.cumprod(blind.confidences, axis=1), blind).auroc == 0.5, "that late prefixes survive less is no merit"


def test_order_is_kept_and_survival_never_rises() -> None:
    scaling = fit_temperatures(drafts(3_000, 3.0))
    grid = np.linspace(0.0, 1.0, 200)
    for k in range(K):
        table = np.full((len(grid), k + 1), 0.7)
        table[:, k] = grid
        survival = scaling.survival(table)
        assert np.all(np.diff(survival[:, k]) >= 0.0)
        assert np.all(np.diff(survival, axis=1) <= 0.0)
        assert np.all((survival >= 0.0) & (survival <= 1.0))


@pytest.mark.parametrize("num_accepted", [0, 2])
@pytest.mark.parametrize("num", [0, 1, 63, 500])
def test_few_or_one_sided_records_are_no_trouble(num: int, num_accepted: int) -> None:
    records = Records.of([((0.9, 0.8), num_accepted)] * num)
    survival = fit_temperatures(records).survival([[0.9, 0.8, 0.7]])
    assert np.all(np.isfinite(survival))
    if num < 64:
        np.testing.assert_allclose(survival, np.cumprod([[0.9, 0.8, 0.7]], axis=1), rtol=1e-6)
    elif num_accepted:
        assert survival[0, 1] > 0.95
    else:
        assert survival[0, 0] < 0.9


def test_tokens_that_were_not_verified_say_nothing() -> None:
    some = drafts(5_000, 2.0)
    cut = np.random.default_rng(3).integers(1, K + 1, len(some))
    partial = Records(some.confidences, cut, np.minimum(cut, some.num_accepted))
    assert worst_ece(fit_temperatures(partial).survival(some.confidences), some) < 0.03


def test_a_draft_cannot_be_more_right_than_long() -> None:
    with pytest.raises(ValueError, match="more accepted"):
        Records.of([((0.5,), 2)])


def test_one_draft_at_a_time_gives_what_the_table_gives() -> None:
    scaling = TemperatureScaling((2.0, 1.5), (0.3, -0.2))
    whole = scaling.conditional((0.9, 0.8, 0.7))
    np.testing.assert_allclose(np.cumprod(whole), scaling.survival([[0.9, 0.8, 0.7]])[0])
    assert scaling.conditional((0.7,), first=2) == pytest.approx(whole[2:])


def test_a_scaling_survives_its_file(tmp_path: Path) -> None:
    calibration = Calibration({0.0: fit_temperatures(drafts(2_000, 2.0)), 0.7: TemperatureScaling((3.0,), (-0.5,))})
    calibration = replace(calibration, with_margins={0.0: TemperatureScaling((1.0, 2.0), (0.1,), (0.7, 0.9))})
    save_calibration(calibration, tmp_path / FILE, ece=0.01, num_records=2000)
    assert load_calibration(tmp_path / FILE) == calibration
    (tmp_path / FILE).write_text('{"format": 1, "temperatures": [2.0, 1.5]}')
    assert load_calibration(tmp_path / FILE).of(0.8) == TemperatureScaling((2.0, 1.5)), "those without offsets are read on"
    assert load_calibration(tmp_path / FILE).with_margins_of(0.8) is None


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[]", '{"format": 9, "temperatures": [1]}', '{"format": 1, "temperatures": [0.0]}']
)
def test_no_calibration_is_one_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(ModelUnavailable, match="outrider train"):
        load_calibration(tmp_path / FILE)


def test_between_two_sampling_temperatures_the_scaling_is_between() -> None:
    calibration = Calibration({0.0: TemperatureScaling((1.0, 2.0), (0.0, 0.0)), 0.8: TemperatureScaling((2.0,), (-0.4,))})

    def at(sampling_temperature: float) -> list[float]:
        return [value for k in range(3) for value in calibration.of(sampling_temperature).at(k)]

    assert at(0.0) == [1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 2.0, 0.0, 0.0]
    assert at(0.4) == pytest.approx([1.5, -0.2, 0.0, 2.0, -0.2, 0.0, 2.0, -0.2, 0.0])
    assert at(1.5) == [2.0, -0.4, 0.0, 2.0, -0.4, 0.0, 2.0, -0.4, 0.0]


def test_margins_move_confidences_by_position() -> None:
    scaling = TemperatureScaling((1.0,), (0.5,), (2.0, 0.0))
    survival = scaling.survival([[0.5, 0.5]], [[1.0, 1.0]])
    first, second = 1 / (1 + np.exp(-2.5)), 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(survival, [[first, first * second]])
    assert log_margins((0.9,)) == pytest.approx((np.log(9.0),))


def test_weights_of_margins_are_found_again() -> None:
    rng = np.random.default_rng(2)
    logits, margins = rng.normal(0.0, 1.2, (20_000, K)), rng.exponential(1.0, (20_000, K))
    right = rng.random(logits.shape) < 1 / (1 + np.exp(-(logits / 1.5 - 1.4 + 1.6 * margins)))
    records = Records(1 / (1 + np.exp(-logits)), np.full(len(logits), K), np.cumprod(right, axis=1).sum(1), margins)
    found = fit_temperatures(records)
    assert found.temperatures[:3] == pytest.approx((1.5,) * 3, rel=0.1)
    assert found.offsets[:3] == pytest.approx((-1.4,) * 3, abs=0.15)
    assert found.margin_weights[:3] == pytest.approx((1.6,) * 3, abs=0.15)
    assert worst_ece(found.survival(records.confidences, margins), records) < 0.02
    assert fit_temperatures(replace(records, log_margins=None)).margin_weights == (0.0,)


def test_right_predictions_show_the_error_of_chance() -> None:
    rng = np.random.default_rng(0)
    told = rng.beta(1.0, 2.0, 800)
    floor = calibrated_error(told)
    seen = [expected_calibration_error(told, rng.random(800) < told) for _ in range(200)]
    assert floor == pytest.approx(np.mean(seen), rel=0.05)
    assert expected_calibration_error(told, rng.random(800) < told**2) > 2 * floor, "too high ones show more"
    assert calibrated_error([]) == 0.0


# ---- online


@pytest.mark.slow
def test_online_it_is_as_good_as_fitted() -> None:
    online = OnlineSurvival()
    for confidences, num_accepted in as_list(drafts(6_000, 2.0)):
        online.record(confidences, num_accepted)
    test = drafts(10_000, 2.0, seed=1)
    assert worst_ece(np.array(online.survival(test.confidences.tolist())), test) < 0.03


def test_online_it_follows_a_drafter_that_changes() -> None:
    online = OnlineSurvival(memory=100)
    for _ in range(600):
        online.record((0.8, 0.8), 2)
    before = online.survival([(0.8, 0.8)])[0]
    assert before[1] > 0.9
    for _ in range(600):
        online.record((0.8, 0.8), 0)
    assert online.survival([(0.8, 0.8)])[0][0] < 0.15


def test_online_a_little_evidence_moves_it_a_little() -> None:
    online = OnlineSurvival()
    assert online.survival([(0.6, 0.5), (), (0.9,)]) == [
        pytest.approx((0.6, 0.3), abs=0.03),
        (),
        pytest.approx((0.9,), abs=0.03),
    ]
    for _ in range(32):
        online.record((0.6,), 0)
    assert 0.02 < online.survival([(0.6,)])[0][0] < 0.4


def test_online_order_is_kept_whatever_was_seen() -> None:
    rng = np.random.default_rng(5)
    online = OnlineSurvival(num_positions=3)
    for _ in range(2_000):
        row = rng.random(5)
        online.record(tuple(row), int(rng.integers(0, 6)))  # nothing to do with the confidences
    grid = np.linspace(0.0, 1.0, 300)
    survival = np.array(online.survival([(p, 0.5, 0.5, 0.5) for p in grid]))
    assert np.all(np.diff(survival[:, 0]) >= 0.0)
    assert np.all(np.diff(survival, axis=1) <= 0.0)


def test_online_many_drafts_at_once_are_calibrated_as_each_alone() -> None:
    rng = np.random.default_rng(6)
    online = OnlineSurvival(num_positions=3)
    for _ in range(200):
        online.record(tuple(rng.random(5)), int(rng.integers(0, 6)))
    many = [tuple(rng.random(length).tolist()) for length in (3, 0, 5, 1, 2, 4, 5, 3, 0, 2, 1, 5)]
    assert online.survival(many) == [found for one in many for found in online.survival([one])]
    assert online.survival([()] * 12) == [()] * 12


def shifted(records: Records, offset: float) -> Records:
    """The same told with ``offset`` added on the logit scale."""
    odds = np.exp(offset) * records.confidences / (1 - records.confidences)
    return Records(odds / (1 + odds), records.num_verified, records.num_accepted)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1.0, -1.0])
def test_online_what_is_wrong_with_all_confidences_is_known_after_a_few_dozen_drafts(offset: float) -> None:
    """When most bins are still empty."""
    test = shifted(drafts(3_000, 1.0, seed=1), offset)
    before, after = [], []
    for seed in range(10):
        online = OnlineSurvival()
        before.append(worst_ece(np.array(online.survival(test.confidences.tolist())), test))
        for confidences, num_accepted in as_list(shifted(drafts(64, 1.0, seed=10 + seed), offset)):
            online.record(confidences, num_accepted)
        after.append(worst_ece(np.array(online.survival(test.confidences.tolist())), test))
    assert np.mean(before) > 0.15
    assert np.mean(after) < 0.09


def test_online_a_drafter_that_tells_the_truth_is_believed_from_the_start() -> None:
    """The first four hundred drafts are foreseen nearly as well as by what it tells: in the mean over drafters to within
    three units of log likelihood in all, of some eight hundred."""
    losses = []
    for seed in range(20):
        online = OnlineSurvival()
        lost = 0.0
        for confidences, num_accepted in as_list(drafts(400, 1.0, seed)):
            foreseen = np.array([1.0, *online.survival([confidences])[0], 0.0])
            told = np.array([1.0, *np.cumprod(confidences), 0.0])
            lost += np.log(
                (told[num_accepted] - told[num_accepted + 1]) / (foreseen[num_accepted] - foreseen[num_accepted + 1])
            )
            online.record(confidences, num_accepted)
        losses.append(lost)
    assert np.mean(losses) < 3.0


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_online_the_surest_confidences_are_corrected_without_overshooting(confidence: float) -> None:
    online, found = OnlineSurvival(), []
    for i in range(320):
        online.record((confidence,), i % 2)
        found.append(online.survival([(confidence,)])[0][0])
    wrong = np.abs(np.array(found) - 0.5)
    assert np.all(wrong[100:] < 0.1)
    assert np.all(np.diff(wrong) < 0.05)


# ---- slope and offset


def told_and_true(num: int, slope: float, offset: float, seed: int = 0) -> tuple[Floats, NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 1.5, num)
    return 1 / (1 + np.exp(-logits)), rng.random(num) < 1 / (1 + np.exp(-slope * logits - offset))


def test_slope_and_offset_are_found_at_the_positions_that_were_seen() -> None:
    scaling = OnlineScaling(num_positions=3, memory=1e9)
    for part in range(60):
        told, came_true = told_and_true(100, 0.5, 0.8, seed=part)
        scaling.learn(told, np.ones(100, np.intp), came_true)
    grid = np.linspace(0.05, 0.95, 19)
    wanted = 1 / (1 + np.exp(-0.5 * np.log(grid / (1 - grid)) - 0.8))
    np.testing.assert_allclose(scaling(grid, np.array([1])), wanted, atol=0.03)
    np.testing.assert_allclose(scaling(grid, np.array([[0], [2]])), [grid, grid])


def test_what_was_learned_fades() -> None:
    scaling = OnlineScaling(num_positions=1, memory=100)
    for offset in (2.0, -2.0):
        for part in range(10):
            told, came_true = told_and_true(50, 1.0, offset, seed=part)
            scaling.learn(told, np.zeros(50, np.intp), came_true)
        (found,) = scaling(np.array([0.5]), np.array([0]))
        assert (found > 0.75) if offset > 0 else (found < 0.25)


def test_the_order_of_confidences_is_kept_whatever_came_true() -> None:
    scaling = OnlineScaling(num_positions=1, memory=500)
    told = np.random.default_rng(0).random(500)
    scaling.learn(told, np.zeros(500, np.intp), told < 0.5)
    assert np.all(np.diff(scaling(np.linspace(0.01, 0.99, 50), np.array([0]))) > 0.0)


# ---- measures


def test_calibration_error_of_what_is_known() -> None:
    assert expected_calibration_error([0.8] * 10, [True] * 8 + [False] * 2) == pytest.approx(0.0)
    assert expected_calibration_error([0.8] * 10, [False] * 10) == pytest.approx(0.8)
    assert expected_calibration_error([], []) == 0.0


def test_auroc_counts_pairs() -> None:
    assert auroc([0.1, 0.2, 0.3, 0.4], [False, False, True, True]) == 1.0
    assert auroc([0.4, 0.3, 0.2, 0.1], [False, False, True, True]) == 0.0
    assert auroc([0.5, 0.5], [False, True]) == 0.5
    assert auroc([0.1, 0.5, 0.5, 0.9], [False, True, False, True]) == pytest.approx(3.5 / 4)
    assert auroc([0.5, 0.6], [True, True]) is None


def test_the_diagram_is_a_picture(tmp_path: Path) -> None:
    records = drafts(500, 2.0)
    curves = [("raw", np.cumprod(records.confidences, axis=1)[:, 0], records.survived(0))]
    plot_reliability(curves, tmp_path / "reliability.png", "first token")
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
