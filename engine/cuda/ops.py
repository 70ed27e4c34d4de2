"""Operators on CUDA: matrix products by cuBLAS, everything else by the Triton kernels of this folder."""

import math

import numpy as np
import torch
import torch.nn.functional as F
import triton
from numpy.typing import NDArray

from engine.batch_layout import Layout
from engine.cuda.kernels import add_norm_kernel, attention_kernel, gate_kernel, rotate_and_store_kernel
from engine.cuda.sampling import CudaGumbelArgmax, Launch, launch
from engine.models.config import DecoderConfig
from engine.models.weights import LinearWeight
from engine.ops import HeadNorms, LayerParts, Linear, Logits, plain_logits

TILES = (16, 32, 64)  # queries of an attention program; 16 is the minimum of a tensor core
_GATE_WIDTH = 1024
_TILE_BYTES = 16 * 2**10  # of the queries of a tile: they live in registers
_STAGED_BYTES = 64 * 2**10  # of queries, keys and values: up to here the next block is loaded during the computation of one


class CudaOps:
    """``engine.ops.Ops`` on the device of its tensors. They must be contiguous; head_dim must be even. ``launch``: how
    kernels are launched; a check without a GPU compiles them instead."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, launch: Launch = launch) -> None:
        self._config = config
        self._dtype = dtype
        self._launch = launch

    def linear(self, weight: LinearWeight) -> Linear:
        dense = weight.dense
        return lambda x: F.linear(x, dense, weight.bias)

    def logits(self, weight: LinearWeight) -> Logits:
        return plain_logits(self.linear(weight))

    def gumbel_argmax(self, token_ids: NDArray[np.int64]) -> CudaGumbelArgmax:
        return CudaGumbelArgmax(token_ids, self._launch)

    def whole_layer(self, parts: LayerParts) -> None:
        return None

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        rows, size = residual.shape
        out = torch.empty(rows, size, dtype=self._dtype, device=residual.device)
        self._launch(
            add_norm_kernel,
            (rows,),
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
        self._launch(
            rotate_and_store_kernel,
            (rows, c.num_heads + 2 * c.num_kv_heads),
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
        block_len, width = keys.shape[3], triton.next_power_of_2(c.head_dim)
        row_bytes = width * self._dtype.itemsize
        # Products of fp32 are unrolled into scalar ones: a larger tile takes the compiler up to a minute, and spills.
        widest = TILES[0] if self._dtype == torch.float32 else max(TILES[0], min(TILES[-1], _TILE_BYTES // row_bytes))
        tile = min(widest, max(TILES[0], triton.next_power_of_2(most_queries)))
        self._launch(
            attention_kernel,
            (layout.num_spans, c.num_kv_heads, triton.cdiv(most_queries, tile)),
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
            BLOCK_LEN=block_len,
            TILE=tile,
            WIDTH=width,
            num_stages=2 if (tile + 2 * block_len) * row_bytes <= _STAGED_BYTES else 1,
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=self._dtype, device=gate_up.device)
        self._launch(gate_kernel, (rows, triton.cdiv(size, _GATE_WIDTH)), gate_up, out, size, WIDTH=_GATE_WIDTH)
        return out
