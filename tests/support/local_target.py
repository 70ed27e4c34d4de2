"""A target of two ranks, the other one in a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.factory import load_target
from engine.models.config import load_config
from engine.native import NativeTarget
from engine.tensor_parallel.local import LocalRanks
from engine.tensor_parallel.sharding import shard_of
from tests.support.waiting import DEADLINE_S


@dataclass(frozen=True, slots=True)
class LocalTarget:
    engine: NativeTarget
    pid: int  # of rank 1


@contextmanager
def local_target(
    folder: Path, num_blocks: int, block_len: int, max_num_sequences: int, max_pass_tokens: int, max_model_len: int
) -> Iterator[LocalTarget]:
    """In fp32 on CPUs."""
    config = load_config(folder)
    own = shard_of(config, 0, 2).config_of(config)
    options = {
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_bytes": num_blocks * block_len * own.kv_bytes_per_token(4),
        "block_len": block_len,
        "max_num_sequences": max_num_sequences,
        "max_pass_tokens": max_pass_tokens,
        "max_model_len": max_model_len,
    }
    ranks = LocalRanks(2, folder, options, threads=1, start_s=DEADLINE_S)
    try:
        engine = load_target(folder, **options, ranks=ranks.group, end_ranks=ranks.close)  # type: ignore[arg-type]
        ranks.group.wait_ready(DEADLINE_S)
        (pid,) = ranks.pids
        yield LocalTarget(engine, pid)
        engine.close()
    finally:
        ranks.close()
