"""The figure of the scores' bias: 1 where virtual rounds are the drafter's own, and not where they are the driver's."""

from pathlib import Path

import pytest

from benchmarks import score_bias
from benchmarks.report import BenchOptions
from cluster.messages import DraftScore
from drafters import counterfactual
from tests.support.tiny_model import write_tiny_model


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    monkeypatch.setattr(score_bias, "NUM_QUICK", 6)
    monkeypatch.setattr(score_bias, "NUM_NEW_TOKENS", 64)
    return BenchOptions(quick=True, model=str(write_tiny_model(tmp_path / "target", max_position_embeddings=2048)))


@pytest.mark.slow
def test_scores_are_what_driving_gives(options: BenchOptions) -> None:
    figures, table = score_bias.run(options)
    assert set(figures) == {"score_bias.ngram", "score_bias.suffix", "score_bias.table"}
    assert all(figure == pytest.approx(1.0, abs=0.02) for figure in figures.values())
    by_name = {str(row[0]): row for row in table.rows}
    assert float(by_name["ngram"][2]) > 1.03, "the test needs drafts that are right"


@pytest.mark.slow
def test_scores_of_a_token_too_many_show(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def inflated(request_id: str, base_len: int, num_matched: int, num_scored: int) -> DraftScore:
        return DraftScore(request_id, base_len, num_matched + 1, num_scored + 1)

    monkeypatch.setattr(counterfactual, "DraftScore", inflated)
    figures, _ = score_bias.run(options)
    assert any(abs(figure - 1.0) > 0.02 for figure in figures.values())
