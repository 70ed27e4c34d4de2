"""The memory of keys and values, in blocks. ``engine.kv_blocks`` assigns blocks to sequences."""

import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import InvalidField
from engine.device import to_device
from engine.models.config import DecoderConfig

BLOCK_LEN = 32  # tokens: two vectors of 16 keys on a CPU, half a tile on a GPU


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers. Position ``t`` of a sequence lies in block ``block_table[t // block_len]`` at ``t %
    block_len``. Keys are transposed within a block, so that scores of neighbouring positions are in neighbouring lanes."""

    keys: torch.Tensor  # [layers, num_blocks, kv_heads, head_dim, block_len]
    values: torch.Tensor  # [layers, num_blocks, kv_heads, block_len, head_dim]

    @staticmethod
    def allocate(
        config: DecoderConfig, num_blocks: int, dtype: torch.dtype, device: torch.device, block_len: int = BLOCK_LEN
    ) -> "KvCache":
        """Allocates a zeroed cache, so that unwritten positions are finite."""
        head = (config.num_layers, num_blocks, config.num_kv_heads)
        shapes = (*head, config.head_dim, block_len), (*head, block_len, config.head_dim)
        return KvCache(*(cache_zeros(shape, dtype, device) for shape in shapes))

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks of all layers, without reading anything back from the device."""
        at, to = (to_device(blocks.astype(np.int64), self.keys.device) for blocks in (sources, targets))
        for tensor in (self.keys, self.values):
            tensor[:, to] = tensor[:, at]

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_len(self) -> int:
        return self.keys.shape[4]


def num_blocks_for(config: DecoderConfig, num_bytes: int, dtype: torch.dtype, block_len: int = BLOCK_LEN) -> int:
    """Blocks that fit into ``num_bytes``. Raises InvalidField: not even one does."""
    block_bytes = block_len * config.kv_bytes_per_token(dtype.itemsize)
    if num_bytes < block_bytes:
        raise InvalidField("kv_cache_gb", num_bytes / 2**30, f"must hold at least one block of {block_bytes} bytes")
    return num_bytes // block_bytes


def cache_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed tensor; on a CPU in huge pages where the system has them, since blocks are scattered over many pages. All
    pages are written once here, so that no pass pays for page faults (0.4 ms each)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).zero_().view(shape)
