"""Calibration of trained drafters, judged by cross-validation."""

from pathlib import Path

import numpy as np
import pytest

from drafters.replay import Round
from profiler.calibration import FILE, Calibration, load_calibration
from training.confidences import DIAGRAM, calibrate, in_halves
from training.corpus import TargetAnswer


def boastful(num: int, seed: int) -> list[Round]:
    """Drafts whose confidences are 0.8 too high on the logit scale."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 1.0, (num, 5))
    num_accepted = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1).sum(1)
    told = 1 / (1 + np.exp(-logits - 0.8))
    return [Round("d", tuple(row), n, n + 1) for row, n in zip(told.tolist(), num_accepted.tolist(), strict=True)]


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
    assert figures["ece_isotonic"] < 0.03
    assert figures["auroc_after"] == pytest.approx(figures["auroc_before"], abs=0.03)
    assert figures["ece_grid"] > figures["ece_after"], "a temperature alone cannot take out an offset"
    assert figures["records.t0.7"] == 1800
    assert figures["ece_after.t0.7"] < 0.04
    assert load_calibration(tmp_path / FILE).of(0.0).offsets[0] == pytest.approx(-0.8, abs=0.15)
    assert '"ece_after"' in (tmp_path / FILE).read_text()
    assert (tmp_path / DIAGRAM).read_bytes().startswith(b"\x89PNG")


def test_calibration_quality_is_cross_validated(tmp_path: Path) -> None:
    honest = [Round("d", (0.5,), i % 2, 1 + i % 2) for i in range(1000)]
    timid = [Round("d", (0.5,), 1, 2)] * 1000
    figures = calibrate({0.0: (honest, timid)}, tmp_path)
    assert figures["ece_after"] > 0.3, "fitted on all it would be 0"


@pytest.mark.parametrize("halves", [([], []), ([Round("d", (), 0, 1)], []), ([Round("d", (0.5,), 1, 2)], [])])
def test_too_few_drafts_leave_confidences_uncalibrated(halves: tuple[list[Round], list[Round]], tmp_path: Path) -> None:
    assert calibrate({0.0: halves}, tmp_path) == {"records": len(halves[0])}
    assert load_calibration(tmp_path / FILE) == Calibration()
