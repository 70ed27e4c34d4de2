"""The trained drafters that come with the program, and the configurations that get them."""

import tomllib
from pathlib import Path

import pytest

from cluster.config import (
    CascadeOptions,
    Config,
    DrafterConfig,
    DSparkOptions,
    ModelConfig,
    NgramOptions,
    TableOptions,
    load,
)
from drafters import shipped
from drafters.shipped import shipped_options, with_shipped
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


def members(config: Config) -> tuple[object, ...]:
    (cascade,) = (drafter.options for drafter in config.drafters if isinstance(drafter.options, CascadeOptions))
    return cascade.members


def test_where_nothing_is_shipped_the_defaults_need_no_training(folder: Path) -> None:
    assert shipped_options(shipped.MODEL) == {}
    assert with_shipped(Config()) == Config()


def test_the_embedded_model_is_served_with_what_was_trained_for_it(full_folder: Path) -> None:
    assert list(shipped_options(shipped.MODEL)) == ["dspark", "layers-2", "table"]
    config = with_shipped(Config())
    assert members(config)[-2:] == (TableOptions(path="table"), DSparkOptions(path="dspark"))
    assert members(config)[:2] == members(Config())[:2]
    assert [d.name for d in config.drafters] == [d.name for d in Config().drafters]
    assert [d.is_companion for d in config.drafters] == [True, False, False]
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
