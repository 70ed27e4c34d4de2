"""One real server for the suites that only talk to it, over the real model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports Ray: it reads these at import, and its processes inherit them.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback only

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
from deploy.bench.server import ServerProcess
from deploy.local_ray import free_port


def small_config(model: str, state_folder: Path) -> Config:
    """The laptop's deployment in fp32, where tokens do not depend on the shape of a batch; every request to ``ngram``."""
    return Config(
        model=ModelConfig(name=model),
        target=TargetConfig(dtype="float32", kv_cache_gb=0.25),
        drafters=(
            DrafterConfig(name="ngram", options=NgramOptions()),
            DrafterConfig(name="suffix", options=SuffixOptions()),
        ),
        router=RouterConfig(policy=FixedPolicy(chain=("ngram",)), slot_ms=100),
        api=ApiConfig(port=free_port()),
        cluster=ClusterConfig(state=FileStateConfig(folder=state_folder)),
    )


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(small_config(str(model_folder), tmp_path_factory.mktemp("state"))) as server:
        yield server
