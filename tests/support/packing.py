"""Sequences computed in randomly packed pieces, to compare with one plain pass."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.forward import CausalModel, PackedSpan
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig, load_config
from engine.models.weights import open_weights
from engine.ops import Ops

BLOCK_LEN = 16


def load_with(
    make_ops: Callable[[DecoderConfig, torch.dtype], Ops],
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kind: type[CausalModel] = CausalModel,
) -> CausalModel:
    config = load_config(folder)
    with open_weights(folder, config, dtype) as weights:
        return kind(config, weights, make_ops(config, dtype), dtype, torch.device(device))


class Sequence:
    """A sequence and its blocks, computed in pieces."""

    def __init__(self, token_ids: list[int], blocks: list[int]) -> None:
        self.token_ids = token_ids
        self.table = np.array(blocks, np.int32)
        self.computed_len = 0
        self.logits: list[torch.Tensor] = []

    def span(self, num_tokens: int) -> PackedSpan:
        end = self.computed_len + num_tokens
        return PackedSpan(self.computed_len, self.token_ids[self.computed_len : end], self.table)


def compute_in_pieces(model: CausalModel, sequences: list[Sequence], cache: KvCache, rng: random.Random) -> None:
    """Computes all sequences, in passes that pack random spans of some of them."""
    while live := [s for s in sequences if s.computed_len < len(s.token_ids)]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        lens = [min(rng.choice([1, 1, 2, 5, 17, 40]), len(s.token_ids) - s.computed_len) for s in chosen]
        hidden = model.forward([s.span(n) for s, n in zip(chosen, lens, strict=True)], cache)
        rows = model.logits(hidden).float().split(lens)
        for sequence, num_tokens, logits in zip(chosen, lens, rows, strict=True):
            sequence.logits.append(logits)
            sequence.computed_len += num_tokens


def random_sequences(vocab_size: int, lens: list[int], rng: random.Random) -> tuple[list[Sequence], int]:
    num_blocks = [-(-length // BLOCK_LEN) for length in lens]
    blocks = rng.sample(range(sum(num_blocks) + 3), sum(num_blocks))  # scattered, and not all of the cache
    sequences = []
    for length, num in zip(lens, num_blocks, strict=True):
        sequences.append(Sequence([rng.randrange(vocab_size) for _ in range(length)], blocks[:num]))
        del blocks[:num]
    return sequences, sum(num_blocks) + 3
