"""The model card of a trained drafter."""

from pathlib import Path
from typing import Any

import pytest

from training.card import CARD, CardData, write_card
from training.corpus import TargetAnswer
from training.evaluation import Acceptance
from training.recipe import TrainOptions


def card(folder: Path, drafter: str, learned: list[TargetAnswer], **options: Any) -> str:
    asked = TrainOptions("target", drafter, Path("/somewhere/mine"), Path("/somewhere/work"), **options)
    found = [Acceptance(7, temperature, 10, 1.5, (0.5,), {"d": 1.5}) for temperature in (0.0, 0.7)]
    confidences = {
        "records": 100.0,
        "ece_before": 0.1,
        "ece_after": 0.02,
        "ece_margins.t0.7": 0.01,
        "brier_margins.t0.7": 0.15,
    }
    write_card(folder, CardData(asked, "target", learned, learned[:1], found, [], {}, confidences))
    return (folder / CARD).read_text()


def answer(key: str, *sources: str) -> TargetAnswer:
    return TargetAnswer(key, "d", 0.0, 0, (1,), (2, 3), sources)


@pytest.mark.parametrize("drafter", ["dspark", "layers"])
def test_the_card_names_the_path_of_the_folder(drafter: str, tmp_path: Path) -> None:
    text = card(tmp_path, drafter, [answer("a")])
    assert f"kind: {drafter}, path: ./mine" in text
    assert "/somewhere" not in text
    assert ("| block |" in text) == (drafter == "dspark")
    assert "| 0 | uncalibrated | 0.100 |  |  |" in text
    assert "| 0 | calibrated | 0.020 |  |  |" in text
    assert "| 0.7 | calibrated, with margins | 0.010 |  | 0.150 |" in text


def test_the_card_describes_the_data(tmp_path: Path) -> None:
    text = card(tmp_path, "dspark", [answer("a"), answer("b", "a")], num_prompts=0, prompts=(Path("/x/mine.jsonl"),))
    assert "written by the target itself" not in text
    assert "given files: mine.jsonl; their licences must be stated by whoever provided them" in text
    assert "1 prompts composed of others" in text
    assert "evaluation sets" not in text
    text = card(tmp_path, "dspark", [answer("a")], data_folder=Path("/x"))
    assert "written by the target itself" in text
    assert "given files" not in text
    assert "composed" not in text
    assert "evaluation sets were left out" in text
