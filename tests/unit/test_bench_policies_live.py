"""Figures of ``outrider bench policies --live``."""

import pytest

from benchmarks.policies_live import Measured, result


def test_the_worst_batch_decides() -> None:
    found = {1: Measured(40.0, 80.0, 2.0, 6, 6), 64: Measured(400.0, 380.0, 1.1, 64, 62)}
    figures = result(found).figures
    assert figures["over_plain.batch_1"] == pytest.approx(2.0)
    assert figures["worst_over_plain"] == figures["over_plain.batch_64"] == pytest.approx(0.95)
    assert figures["identical_fraction"] == pytest.approx(68 / 70)
