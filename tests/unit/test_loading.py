"""From the configuration to a target."""

from pathlib import Path

import pytest

from cluster.config import Config, ModelConfig, TargetConfig
from engine.loading import load_target

pytestmark = pytest.mark.usefixtures("known_costs")


def test_a_folder_is_served_under_its_name_up_to_its_own_length(tiny_model_folder: Path) -> None:
    config = Config(
        model=ModelConfig(name=f"{tiny_model_folder}/", max_model_len=4096),
        target=TargetConfig(device="cpu", dtype="float32", kv_cache_gb=0.01),
    )
    target, info, cost = load_target(config)
    assert info.name == tiny_model_folder.name
    assert info.max_model_len == 512
    assert target.capacity().max_model_len == 512
    assert cost.step_s(64, 0) >= cost.step_s(1, 0) > 0
