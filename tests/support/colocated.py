"""Targets of a tiny model and requests to them, for tests of drafters in the target's process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.embedded import Completion, EmbeddedCluster
from cluster.config import Config, DrafterConfig, ModelConfig, TargetConfig
from cluster.resolve import Inventory, Node, resolve
from cluster.types import FinishReason, ModelInfo, Request
from engine.factory import load_target
from engine.models.tokenizer import fingerprint
from engine.native import NativeTarget
from router.cost_model import TableCost
from tests.support.requests import a_request
from tests.support.tiny_model import write_tiny_model

NODES = Inventory((Node("here", 4.0),))
COST = TableCost((1, 32), (0.02, 0.03))


def write_target(folder: Path) -> Path:
    return write_tiny_model(folder, num_layers=3, hidden_size=64, intermediate_size=96)


def config(target: Path, drafters: Sequence[DrafterConfig], **engine: Any) -> Config:
    engine = {"dtype": "float32", "kv_cache_gb": 0.05, "device": "cpu"} | engine
    return Config(
        model=ModelConfig(name=str(target), max_model_len=256), target=TargetConfig(**engine), drafters=tuple(drafters)
    )


def engine_of(target: Path, layers: tuple[int, ...], num_blocks: int = 64) -> tuple[NativeTarget, ModelInfo]:
    per_block = 32 * 2 * 3 * 32 * 4
    engine = load_target(
        target, dtype="float32", kv_cache_bytes=num_blocks * per_block, max_model_len=256, feature_layers=layers
    )
    return engine, ModelInfo("tiny", 257, 256, (256,), fingerprint(target))


def requests(num: int, max_tokens: int = 40) -> list[Request]:
    return [
        a_request(
            f"r{i}",
            ((7 * i + 11 * t) % 250 for t in range(20 + 9 * i)),
            max_tokens=max_tokens,
            temperature=0.8 * (i % 2),
            seed=i,
            ignore_eos=True,
            arrival_s=float(i),
        )
        for i in range(num)
    ]


def outputs(completions: Sequence[Completion]) -> list[list[int]]:
    assert all(c.commits[-1].finish is FinishReason.LENGTH for c in completions)
    return [c.token_ids for c in completions]


def plain_outputs(target: Path) -> list[list[int]]:
    """Of six requests, without a drafter."""
    with EmbeddedCluster.of(resolve(config(target, ()), NODES)) as cluster:
        return outputs(cluster.complete(requests(6)))
