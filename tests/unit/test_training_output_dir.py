"""The output folder: atomic replacement, and other content is kept."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.errors import InvalidField
from deploy.cli import app
from training.recipe import TrainOptions
from training.work_folder import check_replaceable, replace_folder


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
