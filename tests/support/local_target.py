"""A target of two ranks in fp32 on CPUs, the other one in a process of its own."""

from pathlib import Path

from engine.models.config import load_config
from engine.native import NativeTarget
from engine.tensor_parallel.local import load_over_local_ranks
from engine.tensor_parallel.sharding import shard_of


def load_two_ranks(
    folder: Path, num_blocks: int, block_len: int, max_num_sequences: int, max_pass_tokens: int, max_model_len: int
) -> NativeTarget:
    config = load_config(folder)
    options = {
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_bytes": num_blocks * block_len * shard_of(config, 0, 2).config_of(config).kv_bytes_per_token(4),
        "block_len": block_len,
        "max_num_sequences": max_num_sequences,
        "max_pass_tokens": max_pass_tokens,
        "max_model_len": max_model_len,
    }
    return load_over_local_ranks(2, folder, options)
