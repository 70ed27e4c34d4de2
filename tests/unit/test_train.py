"""``outrider train`` as a whole: kills, refused evaluation prompts, and ``--quick`` on the real model."""

import itertools
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cluster.config import TRAINED_KINDS
from cluster.errors import InvalidField
from deploy.cli import app
from drafters.shipped import kind_of
from drafters.table import FILE as TABLE_FILE
from drafters.table import FrequencyTable
from engine.models.config import load_config
from engine.models.tokenizer import fingerprint
from tests.support.waiting import DEADLINE_S
from tests.support.word_model import write_wordy_model
from training.distributed import World
from training.pipeline import Result, train
from training.recipe import HeadKind, TrainOptions
from training.work_folder import WorkFolder, exclusive

pytestmark = pytest.mark.slow

HERE = World(0, 1, torch.device("cpu"))


class Silent:
    def step(self, name: str, total: float) -> Callable[[float], None]:
        return lambda done: None

    def say(self, line: str) -> None: ...


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wordy_model(tmp_path_factory.mktemp("wordy") / "model")


def options(model: Path, folder: Path, drafter: str = "dspark", **changes: Any) -> TrainOptions:
    small = TrainOptions(
        model=str(model),
        drafter=drafter,
        out=folder / drafter,
        work=folder / "work",
        num_prompts=24,
        num_tokens=900,
        max_answer_tokens=24,
        num_epochs=8,
        num_layers=1,
        block_size=4,
        vocabulary=200,
        markov_rank=8,
        anchor_rank=16,
        dtype="float32",
    )
    return replace(small, **changes)


class Killer(Silent):
    """Kills its own process when a step reports progress for the given time."""

    def __init__(self, step: str, moment: int) -> None:
        self._at = (step, moment)

    def step(self, name: str, total: float) -> Callable[[float], None]:
        moments = itertools.count(1)

        def told(done: float) -> None:
            if (name, next(moments)) == self._at:
                os.kill(os.getpid(), signal.SIGKILL)

        return told


KILLS = (("prompts", 9), ("answers", 9), ("regression", 1), ("training", 3), ("evaluation", 2))


def checkpointed(model: Path, folder: Path) -> TrainOptions:
    """Saves a checkpoint after every step of training."""
    return options(model, folder, num_epochs=4, checkpoint_minutes=0.0)


def train_until_killed(model: Path, folder: Path, step: str, moment: int) -> None:
    train(checkpointed(model, folder), HERE, Killer(step, moment))


@pytest.mark.nightly
def test_a_run_killed_in_every_step_ends_with_the_same_drafter(wordy: Path, tmp_path: Path) -> None:
    """All in processes of their own: sums depend on the number of threads, which other tests may have set in this one."""
    processes = multiprocessing.get_context("forkserver")  # which imports torch once
    processes.set_forkserver_preload([__name__])

    def run(folder: Path, step: str = "none", moment: int = 0) -> int | None:
        child = processes.Process(target=train_until_killed, args=(wordy, folder, step, moment))
        child.start()
        child.join(DEADLINE_S)
        return child.exitcode

    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert run(undisturbed) == 0
    for step, moment in KILLS:
        assert run(killed, step, moment) == -signal.SIGKILL, f"it was to be killed in {step}"
        if step == "training":
            checkpoint = torch.load(killed / "work" / "dspark" / "checkpoint.pt", weights_only=True)
            assert checkpoint["progress"]["step"] == moment - 1, "the next run is to go on from the middle"
    assert run(killed) == 0
    for file in ("model.safetensors", "config.json", "calibration.json", "evaluation.json"):
        same = (checkpointed(wordy, folder).out / file for folder in (killed, undisturbed))
        assert len({path.read_bytes() for path in same}) == 1, file


@pytest.fixture(scope="module")
def trained(wordy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """One work folder, one drafter of each kind."""
    folder = tmp_path_factory.mktemp("trained")
    found: dict[str, Result] = {}
    for drafter in TRAINED_KINDS:
        result = train(options(wordy, folder, drafter), HERE, Silent())
        assert result is not None
        found[drafter] = result
    return folder, found


def test_every_kind_writes_a_folder_with_card_and_plots(trained: tuple[Path, dict[str, Result]]) -> None:
    _, found = trained
    for drafter, result in found.items():
        assert kind_of(result.folder) == drafter
        card = (result.folder / "README.md").read_text()
        assert f"kind: {drafter}, path: ./{drafter}" in card
        assert "| seed | 0 |" in card
        assert (result.folder / "acceptance.png").read_bytes().startswith(b"\x89PNG")
        assert result.trained[0].num_rounds > 20
        if drafter != "table":
            assert (result.folder / "losses.png").read_bytes().startswith(b"\x89PNG")
            assert (result.folder / "calibration.json").exists()


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_every_head_is_trained_and_served(wordy: Path, trained: tuple[Path, dict[str, Result]], head: HeadKind) -> None:
    """The Markov head is the default. ``test_distillation`` checks that the heads learn."""
    folder, _ = trained
    result = train(options(wordy, folder, out=folder / head, head=head, num_epochs=2), HERE, Silent())
    assert result is not None
    assert json.loads((result.folder / "config.json").read_text())["markov_head_type"] == head
    assert f"| head | {head} |" in (result.folder / "README.md").read_text()
    assert result.trained[0].num_rounds > 20
    assert any(share > 0.0 for one in result.trained for share in one.by_position), "none of its drafts was right"


@pytest.mark.parametrize("drafter", ["dspark", "dflash"])
def test_block_drafters_are_trained_in_the_speculators_format(
    wordy: Path, trained: tuple[Path, dict[str, Result]], drafter: str
) -> None:
    """In the speculators format, whose layers are those of Qwen3; evaluated as loaded from there. Whether they learn is
    checked in ``test_distillation``."""
    folder, _ = trained
    asked = options(wordy, folder, drafter, out=folder / f"{drafter}-plain", speculators=True, num_epochs=2)
    result = train(asked, HERE, Silent())
    assert result is not None
    written = json.loads((result.folder / "config.json").read_text())
    assert (written["speculators_model_type"], written["transformer_layer_config"]["model_type"]) == (drafter, "qwen3")
    assert result.trained[0].num_rounds > 20


def test_a_table_records_its_vocabulary(trained: tuple[Path, dict[str, Result]], wordy: Path) -> None:
    table = FrequencyTable.load(trained[1]["table"].folder / TABLE_FILE)
    assert (table.vocab_size, table.tokenizer_fingerprint) == (load_config(wordy).vocab_size, fingerprint(wordy))


def test_layers_learn_from_their_target(trained: tuple[Path, dict[str, Result]]) -> None:
    """A drafter of one of the target's two layers, against the same one with random weights."""
    _, found = trained
    result = found["layers"]
    assert result.trained[0].accepted_len > result.untrained[0].accepted_len + 0.1


def test_generated_text_is_shared_by_all_drafters(trained: tuple[Path, dict[str, Result]]) -> None:
    folder, _ = trained
    lines = (folder / "work" / "answers-0.jsonl").read_text().splitlines()
    names = [(record["key"], record["temperature"]) for record in map(json.loads, lines)]
    assert len(names) == len(set(names))
    manifest = json.loads((folder / "work" / "manifest.json").read_text())
    assert {"prompts", "answers", "train dspark", "train layers"} <= manifest["steps"].keys()
    assert all(step["done"] for step in manifest["steps"].values())


class Listing(Silent):
    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, name: str, total: float) -> Callable[[float], None]:
        self.steps.append(name)
        return super().step(name, total)


def test_training_starts_from_a_trained_drafter(wordy: Path, tmp_path: Path) -> None:
    """The run resumes as others do, and the card names the initial drafter."""
    first = train(options(wordy, tmp_path, num_epochs=4), HERE, Silent())
    assert first is not None
    wanted = TrainOptions(
        model=str(wordy),
        drafter="dspark",
        out=tmp_path / "further",
        work=tmp_path / "work",
        num_prompts=24,
        num_tokens=900,
        max_answer_tokens=24,
        num_epochs=2,
        dtype="float32",
        begin_with=first.folder,
    )
    listing = Listing()
    second = train(wanted, HERE, listing)
    assert second is not None
    assert "training" in listing.steps
    assert "regression" not in listing.steps
    assert second.untrained == first.trained
    weights = (second.folder / "model.safetensors").read_bytes()
    assert weights != (first.folder / "model.safetensors").read_bytes()
    assert (second.folder / "config.json").read_bytes() == (first.folder / "config.json").read_bytes()
    card = (second.folder / "README.md").read_text()
    assert "Initialised from the drafter dspark." in card
    assert "| accepted length | before |" in card
    assert "| block | 4 |" in card
    assert str(tmp_path) not in card
    again = Listing()
    assert train(wanted, HERE, again) is not None
    assert "training" not in again.steps
    assert (second.folder / "model.safetensors").read_bytes() == weights


def test_evaluation_prompts_are_refused(tmp_path: Path) -> None:
    held_back = tmp_path / "data" / "prompts"
    held_back.mkdir(parents=True)
    (held_back / "chat.jsonl").write_text('{"prompt": "What is a river?"}\n')
    (tmp_path / "elsewhere.jsonl").symlink_to(held_back / "chat.jsonl")
    for path in (held_back / "chat.jsonl", tmp_path / "elsewhere.jsonl"):
        arguments = ["train", "--out", str(tmp_path / "out"), "--prompts", str(path), "--data", str(tmp_path / "data")]
        refused = CliRunner().invoke(app, arguments)
        assert refused.exit_code == 1
        assert "the evaluation sets" in refused.stderr
        assert str(path) in refused.stderr
    assert not (tmp_path / "out-work" / "answers-0.jsonl").exists()


def test_a_work_folder_belongs_to_one_target_and_seed(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, {"target": "a", "seed": 0})
    assert not work.begin("answers", {"num_tokens": 5})
    assert WorkFolder(tmp_path, {"target": "a", "seed": 0}).begin("answers", {"num_tokens": 5})
    assert not WorkFolder(tmp_path, {"target": "a", "seed": 0}).begin("answers", {"num_tokens": 6})
    for former, resumes in (("None", True), ("8", False)):  # of an option that a later version does not have
        work.begin("train", {"options": {"seed": "0", "rank": former}})
        assert work.begin("train", {"options": {"seed": "0"}}) == resumes
        assert not work.begin("train", {"options": {"seed": "1"}})
    with pytest.raises(InvalidField, match="another seed: choose another folder"):
        WorkFolder(tmp_path, {"target": "a", "seed": 1})
    with pytest.raises(InvalidField, match="another version, which did not record its weights"):
        WorkFolder(tmp_path, {"target": "a", "seed": 0, "weights": "x"})


def test_a_second_run_in_a_work_folder_is_refused(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(InvalidField, match="in use by another run"), exclusive(tmp_path):
        pass


def test_missing_training_data_is_refused(wordy: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="num_prompts"):
        options(wordy, tmp_path, num_prompts=0)
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "bado kilu mena pora"}\n')
    with pytest.raises(InvalidField, match="at least two prompts"):
        train(options(wordy, tmp_path, num_prompts=0, prompts=(prompts,)), HERE, Silent())


@pytest.mark.model
@pytest.mark.nightly
@pytest.mark.parametrize("drafter", ["dspark", "eagle3"])
def test_quick_trains_a_drafter_that_beats_an_untrained_one(drafter: str, model_folder: Path, tmp_path: Path) -> None:
    """On the real model, given prompts and two thousand tokens. Of the rounds with each drafter a share has a right first
    draft token; if both were equally good, the shares would differ by more than two and a half standard errors in one of 160
    runs."""
    prompts = tmp_path / "prompts.jsonl"
    places = ("a harbour", "a mill", "a library", "an orchard", "a school", "a railway", "a bakery", "a forest")
    asks = ("What does one see in", "Write a short story about", "Explain to a child what is done in")
    lines = [json.dumps({"prompt": f"{ask} {place}?"}) for place in places for ask in asks]
    prompts.write_text("\n".join(lines))
    asked = ["--prompts", str(prompts), "--num-prompts", "4", "--tokens", "2000", "--device", "cpu", "--drafter", drafter]
    ran = CliRunner().invoke(app, ["train", "--quick", "--out", str(tmp_path / "mine"), *asked])
    assert ran.exit_code == 0, ran.stderr
    figures = json.loads((tmp_path / "mine" / "evaluation.json").read_text())
    first = {}
    for which in ("trained", "untrained"):
        runs = [one for one in figures[which] if one["draft_len"] == 7]
        num = sum(one["num_rounds"] for one in runs)
        first[which] = (sum(one["by_position"][0] * one["num_rounds"] for one in runs) / num, num)
    (p, n), (q, m) = first["trained"], first["untrained"]
    error = math.sqrt(p * (1 - p) / n + max(q, 1 / m) * (1 - q) / m)
    assert p - q > 2.5 * error, f"trained {p:.3f} of {n} rounds, untrained {q:.3f} of {m}"
