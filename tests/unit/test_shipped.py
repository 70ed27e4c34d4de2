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
from deploy.model_files import with_files
from drafters import shipped, speculator_search
from drafters.shipped import kind_of, shipped_options, with_shipped
from drafters.speculator_search import speculators_for
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


# ---- speculators at hand are named, with what adds those that can be loaded


MODEL = "test/Tiny"
SHAPE = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 257}
DSPARK = {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 4, "hidden_size": 32, "vocab_size": 257}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(speculator_search, "cache_folder", lambda: tmp_path / "hub")
    return tmp_path / "hub"


def write(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_speculators_in_the_cache_are_found_by_their_verifier_or_shape(cache: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", SHAPE)
    assert speculators_for(MODEL, folder) == speculators_for(MODEL, write(tmp_path / "odd", {"text_config": "x"})) == []
    verifier = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": MODEL}}}
    other = {**verifier, "speculators_config": {"verifier": {"name_or_path": "test/Other"}}}
    for name, config in (
        ("eagle3", verifier),
        ("other", other),
        ("dspark", DSPARK),
        ("wider", {**DSPARK, "hidden_size": 64}),
        ("odd", {"speculators_config": {"verifier": "test"}, "text_config": []}),
    ):
        write(cache / f"models--org--{name}" / "snapshots" / ("a" * 40), config)
    (cache / "models--org--dspark" / "snapshots" / ("b" * 40)).mkdir()
    dspark, eagle = map(str, speculators_for(MODEL, folder))
    assert dspark.endswith("""add it by --speculative-config '{"method": "dspark", "model": "org/dspark"}'""")
    assert eagle.endswith("""'{"method": "eagle3", "model": "org/eagle3"}' --set target.engine=vllm""")


@pytest.mark.parametrize("config", [{"num_nextn_predict_layers": 1}, {"text_config": {"mtp_num_hidden_layers": 1}}])
def test_prediction_heads_of_the_model_are_found(config: object, tmp_path: Path) -> None:
    (found,) = speculators_for(MODEL, write(tmp_path / "model", config))
    assert str(found).endswith("""add it by --speculative-config '{"method": "mtp"}' --set target.engine=vllm""")


def test_the_log_names_them_unless_drafters_are_named(
    cache: Path, tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = json.loads((tiny_model_folder / "config.json").read_text())
    shape = {
        "num_target_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "vocab_size": raw["vocab_size"],
    }
    write(cache / "models--org--dspark" / "snapshots" / ("a" * 40), {**DSPARK, **shape})
    config = Config(model=ModelConfig(name=str(tiny_model_folder)))
    with caplog.at_level("INFO", "deploy.model_files"):
        with_files(config)
        assert "org/dspark" in caplog.text
        caplog.clear()
        with_files(Config(model=config.model, drafters=(DrafterConfig(name="ngram", options=NgramOptions()),)))
        assert "org/dspark" not in caplog.text
