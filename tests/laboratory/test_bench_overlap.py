"""The benchmark of overlap, on a tiny model."""

from pathlib import Path

import pytest

from benchmarks.core_sets import usable_cores
from benchmarks.overlap import ARMS, BARRIER, DEFAULT, Case, Found, Pair, compare, result
from router.cost_model import TableCost
from tests.support.tiny_model import write_tiny_model

CASE = Case("third, batch 2", 1 / 3, 2, 24, 3)


def test_every_policy_gives_the_same_tokens(tmp_path: Path) -> None:
    """In float32, with drafts that are verified."""
    pair = Pair(str(write_tiny_model(tmp_path / "model", num_layers=3)), [CASE], "float32")
    cores = usable_cores()
    found = compare(CASE, pair, (cores, cores), {cores.name: TableCost((1, 32), (0.02, 0.03))})
    assert found.agreeing == 1.0
    assert found.tokens_per_s.keys() == set(ARMS)
    assert found.accepted[BARRIER] > 2.0, "drafts agree in three tokens of four"


def test_figures_are_told_apart_by_what_drafting_takes_of_a_round() -> None:
    def found(gain: float, draft_s: float) -> Found:
        rates = dict.fromkeys(ARMS, 100.0) | {DEFAULT: 100.0 * gain, BARRIER: 100.0}
        return Found(rates, dict.fromkeys(ARMS, 2.0), 1.0, draft_s, 0.02)

    cases = [Case(name, 0.5, 1, 8, 1) for name in ("a", "b", "c", "d")]
    measured = zip(cases, [found(1.3, 0.03), found(1.2, 0.02), found(1.01, 0.002), found(0.99, 0.001)], strict=True)
    figures = result(dict(measured)).figures
    assert figures["overlap_over_barrier"] == pytest.approx(1.2)
    assert figures["worst_overlap_over_barrier"] == pytest.approx(0.99)
    assert figures["draft_share.a"] == pytest.approx(0.6)
