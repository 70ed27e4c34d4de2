"""Makes a `VllmTarget` of a configuration. vLLM is imported here, when the first one is made."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import TargetConfig
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from engine.adapter_files import read_adapter
from engine.device import require
from engine.target import LoadedTarget
from engine.vllm.arguments import VllmLimits


def load_vllm(
    folder: Path,
    target: TargetConfig,
    info: ModelInfo,
    feature_layers: Sequence[int] = (),
    proposer: Mapping[str, Any] | None = None,
) -> LoadedTarget:
    """The target of a resolved configuration, as `engine.loading.load_engine`, which has set the environment.

    Raises:
        InvalidField: vLLM is missing or of another version, or refuses the configuration; there is no such device; the KV
            cache cannot hold a sequence of the longest kind.
    """
    require(target.device)
    from engine.vllm.target import VllmTarget

    limits = VllmLimits(
        dtype=target.dtype,
        max_model_len=info.max_model_len,
        max_num_sequences=target.max_num_sequences,
        max_pass_tokens=target.longest_pass,
        block_len=target.block_len,
        kv_cache_bytes=None if target.kv_cache_gb == "auto" and target.device == "cuda" else target.kv_cache_bytes,
        gpu_share=target.gpu_memory_utilization,
        tensor_parallel=target.tensor_parallel,
        device=target.device,
        num_threads=1 if target.resources.threads == "auto" else target.resources.threads,
        binds=target.most == 1,  # several on one machine would be bound to the same cores
        num_adapters=target.num_adapters,
        more=target.vllm,
        proposer=proposer or {},
    )
    engine = VllmTarget(folder, limits, info.eos_token_ids, feature_layers)
    for i, adapter in enumerate(info.adapters):
        try:
            read_adapter(adapter)
            engine.load_adapter(adapter, info.adapters)
        except InvalidField as error:
            raise InvalidField(f"target.lora_modules[{i}].path", adapter.path, error.reason) from error
    return engine
