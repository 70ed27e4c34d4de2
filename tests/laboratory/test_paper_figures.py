"""`outrider bench figures`, in small."""

from pathlib import Path

import pytest

from benchmarks import paper_figures
from benchmarks.paper_figures import BlockDrafts, ScaledDrafts, run
from benchmarks.policy_scenarios import gpu_machine
from benchmarks.report import BenchOptions


def test_the_figures_hold_in_small_and_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("THRESHOLDS", (0.0, 0.8)), ("CONCURRENCY", (1, 128)), ("RATIOS", (0.75,)), ("TOKENS", {True: 20})):
        monkeypatch.setattr(paper_figures, name, value)
    result = run(BenchOptions(quick=True))
    assert result.figures["threshold_acceptance_rises"] == 1.0
    assert result.figures["budget_rise.outrider"] < 0.7, "the budget falls with the load"
    assert result.figures["budget_rise.fixed-4"] > 0.95
    assert result.figures["same_speed.fixed-1"] == pytest.approx(1.0)
    frontier = next(table for table in result.tables if "figure 7" in table.title)
    assert [row[0] for row in frontier.rows] == ["paper: dspark", "fixed-1", "dspark", "outrider"]
    bounds = next(table for table in result.tables if "over a barrier" in table.title)
    _, (ratio, never_awaited, two, most_of_two, outcomes, most_of_outcomes, hits, _) = bounds.rows
    for table in result.tables:
        assert table.columns[-1] == "how"
        assert {str(row[-1]).split(" ")[0] for row in table.rows} == {"measured", "simulated:"}, "the paper's beside ours"
    assert (ratio, never_awaited) == (0.75, 1.75)
    assert 1.0 < float(two) <= float(most_of_two) + 0.1
    assert 1.0 < float(outcomes) <= float(most_of_outcomes) + 0.1
    assert 0.2 < float(hits) < 0.9
    assert (tmp_path / paper_figures.PLOT).exists()


def test_scaled_drafts_change_no_other_cost() -> None:
    cost = gpu_machine("h100-32b", "qwen-1.5b").cost
    scaled, block = ScaledDrafts(cost, 3.0), BlockDrafts(cost, 1.0)
    assert block.draft_s("qwen-1.5b", 4, 8) == cost.draft_s("qwen-1.5b", 4, 1) is not None
    assert scaled.draft_s("qwen-1.5b", 4, 4) == pytest.approx(3.0 * (cost.draft_s("qwen-1.5b", 4, 4) or 0.0))
    assert scaled.catch_up_s("qwen-1.5b", 10) == pytest.approx(3.0 * (cost.catch_up_s("qwen-1.5b", 10) or 0.0))
    assert scaled.draft_s("unknown", 4, 4) is None
    assert scaled.step_s(4, 100) == cost.step_s(4, 100)
    assert scaled.table(100).at(8) == cost.table(100).at(8)
