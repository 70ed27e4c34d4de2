"""Configurations shared by suites."""

from pathlib import Path

from cluster.config import (
    ApiConfig,
    ClusterConfig,
    Config,
    DrafterConfig,
    FileStateConfig,
    FixedPolicy,
    ModelConfig,
    NgramOptions,
    RouterConfig,
    SuffixOptions,
    TargetConfig,
)
from deploy.local_ray import free_port


def small_config(model: str, state_folder: Path) -> Config:
    """The default deployment in fp32, where tokens do not depend on batch shape; all requests use ``ngram``."""
    return Config(
        model=ModelConfig(name=model),
        target=TargetConfig(dtype="float32", device="cpu", kv_cache_gb=0.25),
        drafters=(
            DrafterConfig(name="ngram", options=NgramOptions()),
            DrafterConfig(name="suffix", options=SuffixOptions()),
        ),
        router=RouterConfig(policy=FixedPolicy(chain=("ngram",)), slot_ms=100),
        api=ApiConfig(port=free_port()),
        cluster=ClusterConfig(state=FileStateConfig(folder=state_folder)),
    )
