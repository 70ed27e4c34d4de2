"""Options and failures of `outrider train`: errors in one line with advice."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from cluster.errors import GenerationFailed, InvalidField
from cluster.types import Request
from deploy.cli import app
from drafters.shipped import kind_of
from engine.offline import generate
from tests.support.requests import a_request
from tests.support.word_model import write_wordy_model
from tests.unit.test_train import HERE, Silent, options
from training import writing
from training.card import CARD, CardData, write_card
from training.corpus import TargetAnswer
from training.distributed import join_world
from training.evaluation import Acceptance
from training.frozen import WRITING_COST, FrozenTarget, writing_limits
from training.hidden_states import delete_partial_files
from training.pipeline import train
from training.recipe import TrainOptions
from training.work_folder import check_replaceable, replace_folder
from training.writing import AnswerTask, Writer

CPU = torch.device("cpu")
ASKED = TrainOptions("m", "dspark", Path("out"), Path("work"))


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wordy_model(tmp_path_factory.mktemp("wordy") / "model")


@pytest.fixture(scope="module")
def target(wordy: Path) -> FrozenTarget:
    return FrozenTarget(wordy, device=CPU, dtype="float32", max_model_len=256)


@pytest.mark.parametrize(("field", "value"), [("dtype", "float16"), ("dtype", "int8"), ("device", "mps"), ("device", "gpu")])
def test_unknown_choices_are_refused(field: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=f"{field}: must be .*got '{value}'"):
        replace(ASKED, **{field: value})  # type: ignore[arg-type]
    ran = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "mine"), f"--{field}", value])
    assert ran.exit_code == 1
    assert ran.stderr.startswith(f"outrider: {field}: must be ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidField, match="torch finds no GPU"), join_world("cuda"):
        pass


@pytest.mark.slow
def test_an_explicit_shape_must_equal_the_initial_drafters(wordy: Path, tmp_path: Path) -> None:
    """The initial drafter has blocks of 4; 7 is the default."""
    first = train(options(wordy, tmp_path, "dspark", num_epochs=1), HERE, Silent())
    assert first is not None
    command = ["train", "--model", str(wordy), "--begin-with", str(first.folder), "--out", str(tmp_path / "further")]
    ran = CliRunner().invoke(app, [*command, "--block", "7", "--device", "cpu"])
    assert ran.exit_code == 1
    assert "block_size: must be left out, or 4 as the drafter in dspark has it, got 7" in ran.stderr


def test_a_failing_target_ends_the_run_with_advice(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = a_request("r", (1,) * 300, max_tokens=4)
    with pytest.raises(GenerationFailed, match="request r: "):
        list(generate(target.new_engine(), target.info, WRITING_COST, [too_long]))

    def failing(*_: object, **__: object) -> Iterator[tuple[Request, tuple[int, ...]]]:
        raise GenerationFailed("request r: no memory left")

    monkeypatch.setattr(writing, "generate", failing)
    task = AnswerTask("k", "d", "bado kilu mena", 0.0)
    with pytest.raises(GenerationFailed, match=f"no memory left; its output so far is kept in {tmp_path}"):
        Writer(target, tmp_path, 0).write_answers([task], 4, 4, lambda num: None)


def test_the_writing_cache_holds_the_sequences_in_flight(target: FrozenTarget) -> None:
    """Its 1.5 GB would be 190 thousand blocks of this model."""
    capacity = target.new_engine().capacity()
    assert capacity.num_blocks * capacity.block_len == target.limits.max_in_flight * target.info.max_model_len


def test_text_is_encoded_as_in_serving(wordy: Path, tmp_path: Path) -> None:
    """A chat template writes the special tokens itself; a base model's tokenizer adds its own, as for completions."""
    folder = write_wordy_model(tmp_path / "base")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = tokenizer.token_to_id("[UNK]")
    tokenizer.post_processor = TemplateProcessing(single="[UNK] $A", special_tokens=[("[UNK]", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))

    def encode() -> tuple[int, ...]:
        return FrozenTarget(folder, device=CPU, dtype="float32", max_model_len=256).encode("bado kilu")

    with_template = encode()
    (folder / "chat_template.jinja").unlink()
    assert encode() == (begin, *with_template)


# ---- the output folder: atomic replacement, and other content is kept


def write_drafter(folder: Path, text: str = "first") -> Path:
    folder.mkdir(parents=True)
    (folder / "table.npz").write_text(text)
    (folder / "evaluation.json").write_text("{}")
    return folder


def test_only_a_trained_drafter_is_replaced(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty")
    check_replaceable(write_drafter(tmp_path / "mine"))


def test_a_folder_of_drafters_a_model_and_a_file_are_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafters" / "one")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    beside = write_drafter(tmp_path / "beside")
    write_drafter(beside / "another")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(model)
    for name in ("drafters", "model", "beside", "file", "link"):
        with pytest.raises(InvalidField, match="out: "):
            check_replaceable(tmp_path / name)


def test_the_command_deletes_no_other_folder(tmp_path: Path) -> None:
    other = write_drafter(tmp_path / "drafters" / "one")
    ran = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "drafters"), "--quick"])
    assert ran.exit_code == 1
    assert "is not a trained drafter" in ran.stderr
    assert (other / "table.npz").read_text() == "first"


def test_out_and_work_lie_apart(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for out, work in (("a", "a"), ("a", "a/work"), ("a/b/out", "a"), ("link", "a/work")):
        with pytest.raises(InvalidField, match="must lie apart from the work folder"):
            TrainOptions("m", "dspark", tmp_path / out, tmp_path / work)
    TrainOptions("m", "dspark", tmp_path / "a", tmp_path / "a-work")


def test_the_folder_is_replaced_atomically(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    replace_folder(write_drafter(tmp_path / ".mine.part", "first"), out)
    assert (out / "table.npz").read_text() == "first"
    (out / "stale").write_text("text")
    replace_folder(write_drafter(tmp_path / ".mine.part", "second"), out)
    assert (out / "table.npz").read_text() == "second"
    assert not (out / "stale").exists()
    out.rename(tmp_path / ".mine.old")  # killed before the new one came
    replace_folder(write_drafter(tmp_path / ".mine.part", "third"), out)
    assert (out / "table.npz").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# ---- the model card of a trained drafter


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


# ---- training in several processes, and writing limits by GPU memory


pytestmark = pytest.mark.slow

# One of the processes that torchrun starts. It tells how its own part of the training came out.
ONE = """
import hashlib, sys
from pathlib import Path
import torch
from training import distil
from training.distributed import join_world
from training.pipeline import train
from tests.unit.test_train import Silent, options

class Told(distil.Distillation):
    def run(self, tell):
        super().run(tell)
        values = torch.cat([p.detach().flatten() for p in self._parameters.values()])
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        Path(sys.argv[2], f"told-{world.rank}").write_text(f"{digest} {self.progress.step} {self.num_steps}")

from training import pipeline
pipeline.Distillation = Told
asked = options(Path(sys.argv[1]), Path(sys.argv[2]), num_prompts=60, num_tokens=2400, num_epochs=2)
with join_world("cpu") as world:
    result = train(asked, world, Silent())
    assert (result is not None) == world.is_first
"""


@pytest.mark.nightly
def test_two_processes_write_read_and_train_together(tmp_path: Path) -> None:
    """Each writes its share, both read all answers, and both end with the same weights."""
    model, folder = write_wordy_model(tmp_path / "model"), tmp_path / "run"
    folder.mkdir()
    script = tmp_path / "one.py"
    script.write_text(ONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, str(model), str(folder)], capture_output=True, text=True, timeout=500, env=environment)
    assert ran.returncode == 0, ran.stderr[:3000]
    assert kind_of(folder / "dspark") == "dspark"
    for kind in ("prompts", "answers"):
        assert all((folder / "work" / f"{kind}-{rank}.jsonl").stat().st_size for rank in range(2))
    first, second = ((folder / f"told-{rank}").read_text() for rank in range(2))
    assert first == second
    _, step, num_steps = first.split()
    assert step == num_steps
    kept = sorted((folder / "work" / "readings").iterdir())
    num_answers = sum(len((folder / "work" / f"answers-{rank}.jsonl").read_text().splitlines()) for rank in range(2))
    assert 2 < len(kept) <= num_answers
    assert {path.suffix for path in kept} == {".safetensors"}


def test_partial_files_of_a_killed_run_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.1f.partial").write_text("half")
    (tmp_path / "b.safetensors").write_text("whole")
    delete_partial_files(tmp_path)
    delete_partial_files(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"]


@pytest.mark.parametrize("free_gb", [2, 6, 16, 40, 100])
def test_writing_limits_follow_the_free_memory(free_gb: int) -> None:
    limits = writing_limits(free_gb * 2**30)
    assert limits.kv_cache_gb <= min(24.0, free_gb / 2)
    assert 16 <= limits.max_in_flight <= 1024
    assert 512 <= limits.max_pass_tokens <= 8192


def test_a_large_gpu_writes_more_at_once_than_a_small_one() -> None:
    small, large = writing_limits(8 * 2**30), writing_limits(80 * 2**30)
    assert small.max_in_flight < large.max_in_flight == 1024
    assert small.kv_cache_gb < large.kv_cache_gb == 24.0
