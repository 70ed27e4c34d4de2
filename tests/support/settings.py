"""Configurations shared by suites."""

from pathlib import Path

from cluster.config import (
    ApiConfig,
    ClusterConfig,
    Config,
    DrafterConfig,
    DraftLengthConfig,
    ModelConfig,
    NgramOptions,
    PlannerConfig,
    PolicyConfig,
    RouterConfig,
    StateConfig,
    SuffixOptions,
    SupervisionConfig,
    TargetConfig,
)
from deploy.local_ray import free_port

# Drafts are proposed, awaited and verified whatever they are worth on this machine, busy or not.
ALWAYS_DRAFTED = PlannerConfig(
    draft_length=DraftLengthConfig(kind="fixed"), verify="all", overlap="barrier", max_hold_ms=2000
)


API_KEY = "sk-of-a-test"


def small_config(model: str, state_folder: Path) -> Config:
    """The default deployment in fp32, where tokens do not depend on batch shape; all requests use ``ngram``.

    Health checks wait 10 s, so that a slow machine is not mistaken for a hang; a killed process is replaced at once."""
    return Config(
        model=ModelConfig(name=model),
        target=TargetConfig(dtype="float32", device="cpu", kv_cache_gb=0.25),
        drafters=(
            DrafterConfig(name="ngram", options=NgramOptions()),
            DrafterConfig(name="suffix", options=SuffixOptions()),
        ),
        router=RouterConfig(policy=PolicyConfig(kind="fixed", chain=("ngram",))),
        api=ApiConfig(port=free_port()),
        cluster=ClusterConfig(state=StateConfig(folder=state_folder)),
        supervision=SupervisionConfig(health_timeout_ms=10_000),
    )
