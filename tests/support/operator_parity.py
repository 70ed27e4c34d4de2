"""Operators of one device against plain torch on it."""

import numpy as np
import torch

from engine.batch_layout import PackedSpan, lay_out
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig, inverse_frequencies
from engine.ops import HeadNorms, Ops, TorchOps
from tests.support.packing import BLOCK_LEN
from tests.support.triton_aot import Case


def config_of(head_dim: int, num_heads: int, num_kv_heads: int, qk_norm: bool) -> DecoderConfig:
    return Case(0, "", head_dim, (num_heads, num_kv_heads), BLOCK_LEN, qk_norm, 72).config


def check_operators(ops: Ops, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Every operator, on random inputs with a context of scattered blocks."""
    generator = torch.Generator().manual_seed(config.head_dim)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    spans = [PackedSpan(37, (0,) * 5, np.array([3, 0, 2], np.int32)), PackedSpan(0, (0,), np.array([1], np.int32))]
    layout = lay_out(spans, BLOCK_LEN, torch.tensor(inverse_frequencies(config)), device)
    history = KvCache.allocate(config, 4, dtype, device, BLOCK_LEN)
    history.keys.copy_(rand(*history.keys.shape))
    history.values.copy_(rand(*history.values.shape))
    residual, delta, weight = rand(6, config.hidden_size), rand(6, config.hidden_size).to(dtype), rand(config.hidden_size)
    qkv = rand(6, config.q_size + 2 * config.kv_size).to(dtype)
    norms = HeadNorms(rand(config.head_dim), rand(config.head_dim)) if config.qk_norm else None
    gate_up = rand(6, 2 * config.intermediate_size).to(dtype)
    results = []
    for each in (ops, TorchOps(config, dtype)):
        own = residual.clone()
        keys, values = history.keys[0].clone(), history.values[0].clone()
        queries = each.rotate_and_store(qkv, norms, layout, keys, values)
        attended = each.attention(queries, layout, keys, values)
        results.append([each.add_norm(own, delta, weight), own, queries, keys, values, attended, each.gate(gate_up)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
