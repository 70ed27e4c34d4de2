"""Options and failures of `outrider train`: errors in one line with advice."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from cluster.errors import GenerationFailed, InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from deploy.cli import app
from engine.offline import generate
from tests.support.word_model import write_wordy_model
from tests.unit.test_train import HERE, Silent, options
from training import writing
from training.distributed import join_world
from training.frozen import WRITING_COST, FrozenTarget
from training.pipeline import train
from training.recipe import TrainOptions
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
    too_long = Request("r", (1,) * 300, SamplingParams(max_tokens=4), arrival_s=0.0)
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
