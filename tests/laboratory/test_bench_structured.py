"""The benchmark of structured output on a few schemas, with the real model."""

import pytest

from benchmarks import structured
from benchmarks.report import BenchOptions


@pytest.mark.model
def test_answers_are_valid_end_and_do_not_depend_on_drafts(model_folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("NUM_SCHEMAS_QUICK", 4), ("NUM_TIMED_QUICK", 1), ("NUM_TURNS", 1)):
        monkeypatch.setattr(structured, name, number)
    result = structured.run(BenchOptions(quick=True))
    fractions = {name: figure for name, figure in result.figures.items() if "fraction" in name}
    assert set(fractions.values()) == {1.0}
    assert len(fractions) == 6
    assert 0 < result.figures["compile_cpu_s.max"] < 1
    assert result.figures["structured_speedup.batch_1"] > 0
