"""Resuming runs with a time budget."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.word_model import write_wordy_model
from tests.unit.test_train import HERE, Silent, options
from training import work_folder
from training.batches import BatchPlan
from training.distil import Distillation, Schedule
from training.feature_cache import InMemory
from training.frozen import FrozenTarget
from training.hidden_states import HiddenStateReader
from training.layers_student import LayersStudent
from training.pipeline import train
from training.work_folder import WorkFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tiny_model_folder: Path) -> FrozenTarget:
    return FrozenTarget(tiny_model_folder, device=HERE.device, dtype="float32", max_model_len=256)


class Cut(Exception):
    """The interruption of a run."""


class Cutting(Silent):
    """Interrupts a run at the given report of a step, and records the reports."""

    def __init__(self, name: str = "", moment: int = 0) -> None:
        self._at = (name, moment)
        self.told: dict[str, list[float]] = {}

    def step(self, name: str, total: float) -> Callable[[float], None]:
        told = self.told.setdefault(name, [])

        def tell(done: float) -> None:
            told.append(done)
            if (name, len(told)) == self._at:
                raise Cut

        return tell


def clock(monkeypatch: pytest.MonkeyPatch, tick_s: float) -> None:
    """Every reading of the clock advances it."""
    times = itertools.count(0.0, tick_s)
    monkeypatch.setattr(work_folder, "monotonic", lambda: next(times))


def test_time_spent_by_earlier_runs_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 10.0)

    def run(seconds: float | None = 100.0, **settings: int) -> int:
        """Returns how often it may be asked before the time is over, at most twenty times."""
        work = WorkFolder(tmp_path, {"target": "a"})
        work.begin("answers", settings)
        is_over = work.deadline("answers", seconds)
        return sum(1 for _ in itertools.takewhile(lambda _: not is_over(), range(20)))

    work = WorkFolder(tmp_path, {"target": "a"})
    work.begin("answers", {})
    is_over = work.deadline("answers", 100.0)
    assert not any(is_over() for _ in range(6))  # and then it is killed
    assert run() == 3
    assert run() == 0
    assert run(num_tokens=5) == 9, "with other settings it begins anew"
    assert run(seconds=None, num_tokens=5) == 20


def test_a_finished_step_gets_no_more_time(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, {"target": "a"})
    work.begin("answers", {})
    work.finish("answers")
    assert work.deadline("answers", 100.0)()


def test_a_checkpoint_that_is_damaged_or_of_another_format_is_ignored(target: FrozenTarget, tmp_path: Path) -> None:
    readings = HiddenStateReader(target, (0, 1), InMemory(0), max_pass_tokens=1)
    plan, timing, path = BatchPlan(100, 10), Schedule(num_epochs=1, learning_rate=1e-3), tmp_path / "checkpoint.pt"

    def training() -> Distillation:
        return Distillation(torch.nn.Linear(2, 2), [], readings, plan, timing, HERE, path, seed=0)

    assert not training().restore()
    training().save()
    assert training().restore()
    path.write_bytes(path.read_bytes()[:1000])
    assert not training().restore()
    training().save()
    torch.save(torch.load(path, weights_only=True) | {"format": 0}, path)
    assert not training().restore()


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_work_folder_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged manifest\.json"):
        WorkFolder(tmp_path, {})


def test_layers_drafters_are_saved_atomically(target: FrozenTarget, tmp_path: Path) -> None:
    """They are saved every few minutes, and may be served meanwhile."""
    mine, folder = LayersStudent(target, (0,), None), tmp_path / "mine"
    mine.save(folder)
    with (folder / "model.safetensors").open("rb") as served:
        mine.save(folder)
        assert os.fstat(served.fileno()).st_nlink == 0, "the file that is mapped stays what it was"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_run_whose_writing_time_is_over_resumes_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompts or answers are added, so training does not start anew."""
    model = write_wordy_model(tmp_path / "model")
    given = tmp_path / "given.jsonl"
    syllables = ("ba", "do", "ki", "lu", "me", "na", "po", "ra", "si", "tu")
    lines = [f"{a}{b} {b}{a} {a}{a}" for a, b in itertools.product(syllables, repeat=2)][:60]
    given.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    asked = options(model, tmp_path, prompts=(given,), num_tokens=20_000, budget_minutes=10.0, checkpoint_minutes=0.0)
    written = [tmp_path / "work" / f"{kind}-0.jsonl" for kind in ("prompts", "answers")]

    clock(monkeypatch, 4.0)
    first = Cutting("training", 5)
    with pytest.raises(Cut):
        train(asked, HERE, first)
    assert max(first.told["prompts"]) < asked.num_prompts, "the time is to end it early"
    assert max(first.told["answers"]) < asked.num_tokens, "the time is to end it early"
    before = [path.read_bytes() for path in written]

    clock(monkeypatch, 4.0)
    second = Cutting()
    assert train(asked, HERE, second) is not None
    assert [path.read_bytes() for path in written] == before
    assert "regression" not in second.told
    assert second.told["training"][0] > first.told["training"][0]
