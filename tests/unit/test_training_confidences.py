"""Calibration of trained drafters, judged by cross-validation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profiler.calibration import FILE, Calibration, load_calibration
from training.corpus import TargetAnswer
from training.evaluation import DIAGRAM, JudgedDraft, calibrate, in_halves


def boastful(num: int, seed: int) -> list[JudgedDraft]:
    """Drafts whose confidences are 0.8 too high on the logit scale."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 1.0, (num, 5))
    num_accepted = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1).sum(1)
    told = 1 / (1 + np.exp(-logits - 0.8))
    return [JudgedDraft(tuple(row), n) for row, n in zip(told.tolist(), num_accepted.tolist(), strict=True)]


def answer(key: str, temperature: float) -> TargetAnswer:
    return TargetAnswer(key, "d", temperature, 0, (1,), (2, 3))


def test_halves_share_no_prompt() -> None:
    answers = [answer(key, temperature) for key in "abcde" for temperature in (0.0, 0.7)]
    first, second = in_halves(answers)
    assert {a.key for a in first} == {"a", "c", "e"}
    assert {a.key for a in second} == {"b", "d"}
    assert len(first) + len(second) == len(answers)
    assert in_halves(answers[:2]) == (answers[:2], [])


def test_calibration_quality_is_written(tmp_path: Path) -> None:
    figures = calibrate({0.0: (boastful(3000, 0), boastful(3000, 1)), 0.7: (boastful(900, 2), boastful(900, 3))}, tmp_path)
    assert figures["records"] == 6000
    assert figures["ece_before"] > 0.08
    assert figures["ece_after"] < 0.025
    assert figures["auroc_after"] == pytest.approx(figures["auroc_before"], abs=0.03)
    assert figures["ece_grid"] > figures["ece_after"], "a temperature alone cannot take out an offset"
    assert figures["records.t0.7"] == 1800
    assert figures["ece_after.t0.7"] < 0.04
    assert load_calibration(tmp_path / FILE).of(0.0).offsets[0] == pytest.approx(-0.8, abs=0.15)
    assert '"ece_after"' in (tmp_path / FILE).read_text()
    for diagram in (DIAGRAM, "reliability.t0.7.png"):
        assert (tmp_path / diagram).read_bytes().startswith(b"\x89PNG")


def coupled(num: int, seed: int) -> list[JudgedDraft]:
    """Drafts of one token by a drafter that knows the target's noise, told as the probability that a rejection sampler would
    accept them."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0.0, 2.0, (num, 60))
    own = target + rng.normal(0.0, 1.0, target.shape) * rng.uniform(0.9, 1.1, (num, 1))
    noise = rng.gumbel(size=target.shape)
    is_right = (own + noise).argmax(1) == (target + noise).argmax(1)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (target, own))
    scores = np.sort(own + noise, axis=1)
    told, margins = np.minimum(p, q).sum(1), np.log1p(scores[:, -1] - scores[:, -2])
    return [
        JudgedDraft((c,), int(right), (m,)) for c, right, m in zip(told.tolist(), is_right, margins.tolist(), strict=True)
    ]


def test_confidences_are_those_of_coupled_noise(tmp_path: Path) -> None:
    halves = coupled(6000, 0), coupled(6000, 1)
    figures = calibrate({0.8: halves}, tmp_path)
    assert figures["ece_before"] > 0.03, "shared noise matches less often than a rejection sampler accepts"
    assert figures["ece_after"] < 0.02
    assert figures["brier_margins"] < 0.9 * figures["brier_after"]
    found = load_calibration(tmp_path / FILE).with_margins_of(0.8)
    assert found is not None
    assert found.margin_weights[0] > 0.5


def test_margins_of_other_drafts_are_worth_nothing(tmp_path: Path) -> None:
    drafts = coupled(6000, 0)
    others = [
        replace(one, log_margins=other.log_margins) for one, other in zip(drafts, drafts[1:] + drafts[:1], strict=True)
    ]
    figures = calibrate({0.8: (others[::2], others[1::2])}, tmp_path)
    assert figures["brier_margins"] > 0.98 * figures["brier_after"]


def test_calibration_quality_is_cross_validated(tmp_path: Path) -> None:
    honest = [JudgedDraft((0.5,), i % 2) for i in range(1000)]
    timid = [JudgedDraft((0.5,), 1)] * 1000
    figures = calibrate({0.0: (honest, timid)}, tmp_path)
    assert figures["ece_after"] > 0.3, "fitted on all it would be 0"


@pytest.mark.parametrize("halves", [([], []), ([JudgedDraft((), 0)], []), ([JudgedDraft((0.5,), 1)], [])])
def test_too_few_drafts_leave_confidences_uncalibrated(
    halves: tuple[list[JudgedDraft], list[JudgedDraft]], tmp_path: Path
) -> None:
    assert calibrate({0.0: halves}, tmp_path) == {"records": len(halves[0])}
    assert load_calibration(tmp_path / FILE) == Calibration()
