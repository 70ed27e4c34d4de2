"""Makes a `VllmTarget` of a configuration. vLLM is imported here, when the first one is made."""

from collections.abc import Sequence
from pathlib import Path

from cluster.config import TargetConfig
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from engine.device import require
from engine.factory import DTYPES
from engine.kv_cache import num_blocks_for
from engine.models.config import DecoderConfig
from engine.target import LoadedTarget
from engine.vllm.environment import prepare_environment
from engine.vllm.ranks import shard_of


def load_vllm(
    folder: Path, model: DecoderConfig, target: TargetConfig, info: ModelInfo, feature_layers: Sequence[int] = ()
) -> LoadedTarget:
    """The target of a resolved configuration, as `engine.loading.load_engine`.

    Raises:
        InvalidField: vLLM is missing or of another version; there is no such device; the ranks do not divide the model;
            the KV cache cannot hold a sequence of the longest kind.
    """
    require(target.device)
    shard = shard_of(model, target.tensor_parallel)
    prepare_environment()
    from engine.vllm.target import VllmLimits, VllmTarget

    kv_cache_bytes = int(target.kv_cache_gb * 2**30)
    num_tokens = (num_blocks_for(shard, kv_cache_bytes, DTYPES[target.dtype], target.block_len) - 1) * target.block_len
    if num_tokens < info.max_model_len:
        raise InvalidField(
            "max_model_len",
            info.max_model_len,
            f"a KV cache of {num_tokens} tokens cannot hold one such sequence: enlarge kv_cache_gb or lower max_model_len",
        )
    limits = VllmLimits(
        dtype=target.dtype,
        max_model_len=info.max_model_len,
        max_num_sequences=target.max_num_sequences,
        max_pass_tokens=target.longest_pass,
        block_len=target.block_len,
        kv_cache_bytes=kv_cache_bytes,
        tensor_parallel=target.tensor_parallel,
        device=target.device,
        num_threads=1 if target.resources.threads == "auto" else target.resources.threads,
        binds=target.most == 1,  # several on one machine would be bound to the same cores
    )
    return VllmTarget(folder, limits, info.eos_token_ids, feature_layers)
