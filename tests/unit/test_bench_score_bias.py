"""The figure of the scores' bias: 1 where virtual rounds are the drafter's own, and not where they are the driver's."""

from pathlib import Path

import pytest

from benchmarks import score_bias
from benchmarks.report import BenchOptions
from drafters import counterfactual
from tests.support.tiny_model import write_tiny_model


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    monkeypatch.setattr(score_bias, "NUM_QUICK", 6)
    monkeypatch.setattr(score_bias, "NUM_NEW_TOKENS", 64)
    return BenchOptions(quick=True, model=str(write_tiny_model(tmp_path / "target", max_position_embeddings=2048)))


def test_scores_are_what_driving_gives(options: BenchOptions) -> None:
    figures, table = score_bias.run(options)
    assert set(figures) == {"score_bias.ngram", "score_bias.suffix", "score_bias.table"}
    assert all(figure == pytest.approx(1.0, abs=0.02) for figure in figures.values())
    by_name = {str(row[0]): row for row in table.rows}
    assert float(by_name["ngram"][2]) > 1.03, "the test needs drafts that are right"


def test_rounds_that_begin_too_late_show(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual round that follows a wrong draft begins three tokens late."""
    decide = counterfactual.Shadow._decide

    def late(shadow: counterfactual.Shadow, *args: object) -> object:
        score = decide(shadow, *args)  # type: ignore[arg-type]
        shadow._next_base_len += 3
        return score

    monkeypatch.setattr(counterfactual.Shadow, "_decide", late)
    figures, _ = score_bias.run(options)
    assert any(abs(figure - 1.0) > 0.02 for figure in figures.values())
