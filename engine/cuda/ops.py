"""Operators on CUDA: matrix products by cuBLAS, everything else by the Triton kernels beside this file."""

import math

import numpy as np
import torch
import torch.nn.functional as F
import triton
from numpy.typing import NDArray

from engine.cuda.kernels import add_norm_kernel, attention_kernel, gate_kernel, rotate_and_store_kernel
from engine.layout import Layout
from engine.models.config import ModelConfig
from engine.models.weights import LinearWeight
from engine.ops import HeadNorms, Linear, Logits, plain_logits

_GATE_WIDTH = 1024
_MIN_TILE = 16  # the least that a tensor core multiplies
_MAX_TILE = 64


class CudaOps:
    """``engine.ops.Ops`` on the device of its tensors. They must be contiguous; head_dim must be even."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype

    def linear(self, weight: LinearWeight) -> Linear:
        return lambda x: F.linear(x, weight.weight, weight.bias)

    def logits(self, weight: LinearWeight) -> Logits:
        return plain_logits(self.linear(weight))

    def race(self, token_ids: NDArray[np.int64]) -> None:
        return None

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        rows, size = residual.shape
        out = torch.empty(rows, size, dtype=self._dtype, device=residual.device)
        add_norm_kernel[(rows,)](
            residual,
            residual if delta is None else delta,
            weight,
            out,
            size,
            self._config.norm_eps,
            HAS_DELTA=delta is not None,
            WIDTH=triton.next_power_of_2(size),
        )
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: HeadNorms | None, layout: Layout, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        c = self._config
        rows = qkv.shape[0]
        queries = torch.empty(rows, c.num_heads, c.head_dim, dtype=torch.float32, device=qkv.device)
        rotate_and_store_kernel[(rows, c.num_heads + 2 * c.num_kv_heads)](
            qkv,
            queries if norms is None else norms.q,
            queries if norms is None else norms.k,
            c.norm_eps,
            layout.cos,
            layout.sin,
            layout.slots,
            queries,
            keys,
            values,
            1.0 / math.sqrt(c.head_dim),
            HEADS=c.num_heads,
            KV_HEADS=c.num_kv_heads,
            HEAD_DIM=c.head_dim,
            BLOCK_LEN=keys.shape[3],
            HAS_NORMS=norms is not None,
            WIDTH=triton.next_power_of_2(c.head_dim // 2),
        )
        return queries

    def attention(self, queries: torch.Tensor, layout: Layout, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        c = self._config
        out = torch.empty(queries.shape[0], c.q_size, dtype=self._dtype, device=queries.device)
        most_queries = layout.max_span_len * (c.num_heads // c.num_kv_heads)
        tile = min(_MAX_TILE, max(_MIN_TILE, triton.next_power_of_2(most_queries)))
        attention_kernel[(layout.num_spans, c.num_kv_heads, triton.cdiv(most_queries, tile))](
            queries,
            keys,
            values,
            layout.starts,
            layout.base_lens,
            layout.tables,
            layout.tables.stride(0),
            out,
            HEADS=c.num_heads,
            KV_HEADS=c.num_kv_heads,
            HEAD_DIM=c.head_dim,
            BLOCK_LEN=keys.shape[3],
            TILE=tile,
            WIDTH=triton.next_power_of_2(c.head_dim),
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=self._dtype, device=gate_up.device)
        gate_kernel[(rows, triton.cdiv(size, _GATE_WIDTH))](gate_up, out, size, WIDTH=_GATE_WIDTH)
        return out
