"""The trained drafters that come with the program, and the configurations that get them."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import deploy.train
from cluster.config import (
    CascadeOptions,
    Config,
    DrafterConfig,
    HiddenStateOptions,
    ModelConfig,
    NgramOptions,
    TableOptions,
    load,
)
from deploy.cli import app
from drafters import shipped
from drafters.shipped import kind_of, shipped_options, with_shipped
from drafters.table import FILE as TABLE_FILE
from drafters.table import FrequencyTable
from tests.support.dspark import write_dspark
from tests.support.tiny_model import write_tiny_layers, write_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where drafters are shipped; empty."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "assets" / "drafters")
    return tmp_path / "assets" / "drafters"


@pytest.fixture
def full_folder(folder: Path, tmp_path: Path) -> Path:
    target = write_tiny_model(tmp_path / "target")
    write_dspark(folder / "dspark", target)
    write_tiny_layers(folder / "layers-2", target, range(200))
    (folder / "table").mkdir()
    (folder / "table" / "table.npz").touch()
    return folder


def test_training_goes_on_with_the_folder_that_was_named(
    full_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(full_folder / "dspark", tmp_path / "dspark")
    seen: list[Path | None] = []
    monkeypatch.setattr(deploy.train, "train", lambda options, *_: seen.append(options.begin_with))
    for name in ("dspark", "./dspark"):
        arguments = ["train", "--begin-with", name, "--out", str(tmp_path / "out"), "--device", "cpu"]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert seen == [full_folder / "dspark", tmp_path / "dspark"]


def members(config: Config) -> tuple[object, ...]:
    (cascade,) = (drafter.options for drafter in config.drafters if isinstance(drafter.options, CascadeOptions))
    return cascade.members


def test_where_nothing_is_shipped_the_defaults_need_no_training(folder: Path) -> None:
    assert shipped_options(shipped.MODEL) == {}
    assert with_shipped(Config()) == Config()


def test_the_embedded_model_is_served_with_what_was_trained_for_it(full_folder: Path) -> None:
    assert list(shipped_options(shipped.MODEL)) == ["dspark", "layers-2", "table"]
    config = with_shipped(Config())
    assert members(config)[-2:] == (TableOptions(path="table"), HiddenStateOptions(path="dspark"))
    assert members(config)[:2] == members(Config())[:2]
    assert [d.name for d in config.drafters] == [d.name for d in Config().drafters]
    assert [d.is_colocated for d in config.drafters] == [True, False, False]
    assert with_shipped(config) is config


def test_whoever_names_drafters_or_another_model_gets_no_others(full_folder: Path, tmp_path: Path) -> None:
    named = Config(drafters=(DrafterConfig(name="ngram", options=NgramOptions()),))
    other = Config(model=ModelConfig(name="/models/another"))
    file = tmp_path / "plain.yaml"
    file.write_text("drafters: []")
    for config in (named, other, load(file)):
        assert with_shipped(config) is config
    assert shipped_options("/models/another") == {}


def test_a_wheel_holds_what_is_shipped() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert shipped.FOLDER.relative_to(ROOT).parts[0] in wheel["packages"]


def test_what_is_shipped_is_small_enough_to_come_with_every_copy() -> None:
    num_bytes = sum(path.stat().st_size for path in shipped.FOLDER.rglob("*") if path.is_file())
    assert 0 < num_bytes <= 48e6


def test_all_that_is_shipped_says_the_same_tokenizer() -> None:
    folders = [shipped.FOLDER / name for name in shipped.shipped_names()]
    tables = [FrequencyTable.load(folder / TABLE_FILE) for folder in folders if kind_of(folder) == "table"]
    configs = [json.loads((f / "config.json").read_text()) for f in folders if kind_of(f) != "table"]
    assert tables
    assert configs
    fingerprints = {table.tokenizer_fingerprint for table in tables} | {c["tokenizer_fingerprint"] for c in configs}
    assert len(fingerprints) == 1
    assert None not in fingerprints
    assert {table.vocab_size for table in tables} == {config["vocab_size"] for config in configs}
