"""Speculators at hand are named, with what adds those that can be loaded."""

import json
from pathlib import Path

import pytest

from cluster.config import Config, DrafterConfig, ModelConfig, NgramOptions
from deploy.model_files import with_files
from drafters import speculator_search
from drafters.speculator_search import speculators_for

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
    assert speculators_for(MODEL, folder) == []
    verifier = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": MODEL}}}
    other = {**verifier, "speculators_config": {"verifier": {"name_or_path": "test/Other"}}}
    for name, config in (
        ("eagle3", verifier),
        ("other", other),
        ("dspark", DSPARK),
        ("wider", {**DSPARK, "hidden_size": 64}),
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
