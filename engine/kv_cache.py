"""The memory that keys and values lie in, cut into blocks. Which sequence holds which block is the ledger's affair."""

from dataclasses import dataclass

import torch

from engine.models.config import ModelConfig

BLOCK_LEN = 32  # tokens: two vectors of 16 keys on a CPU, and half a tile on a GPU


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers.

    Position ``t`` of a sequence lies in block ``block_table[t // block_len]`` at ``t % block_len``. Keys are stored
    transposed within a block, so that the scores of neighbouring positions are computed in neighbouring lanes.
    """

    keys: torch.Tensor  # [layers, num_blocks, kv_heads, head_dim, block_len]
    values: torch.Tensor  # [layers, num_blocks, kv_heads, block_len, head_dim]

    @staticmethod
    def allocate(
        config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device, block_len: int = BLOCK_LEN
    ) -> "KvCache":
        """Zeroed, so that what was never written holds numbers; on Linux its pages become resident when first written."""
        head = (config.num_layers, num_blocks, config.num_kv_heads)
        return KvCache(
            torch.zeros(*head, config.head_dim, block_len, dtype=dtype, device=device),
            torch.zeros(*head, block_len, config.head_dim, dtype=dtype, device=device),
        )

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_len(self) -> int:
        return self.keys.shape[4]


def num_blocks_for(config: ModelConfig, num_bytes: int, dtype: torch.dtype, block_len: int = BLOCK_LEN) -> int:
    """Blocks that fit into ``num_bytes``.

    Raises:
        ValueError: not even one does.
    """
    block_bytes = block_len * config.kv_bytes_per_token(dtype.itemsize)
    if num_bytes < block_bytes:
        raise ValueError(f"a KV cache of {num_bytes} bytes holds no block: one takes {block_bytes} bytes")
    return num_bytes // block_bytes
