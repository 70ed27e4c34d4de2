"""Runs every variant of every kernel once, so that all are compiled before the first request."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from triton.errors import TritonError

from engine.batch_layout import PackedSpan, lay_out
from engine.compiling import KernelsUnavailable
from engine.cuda.ops import TILES, CudaOps
from engine.cuda.sampling import CudaGumbelArgmax
from engine.device import synchronize
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig, inverse_frequencies
from engine.ops import HeadNorms


def try_out(ops: CudaOps, config: DecoderConfig, dtype: torch.dtype, device: torch.device, block_len: int) -> None:
    """Calls each operator with small inputs on ``device``. Raises KernelsUnavailable: a kernel cannot be compiled or
    launched. An error of the device itself is raised as it is."""
    with _failures(device):
        _run_all(ops, config, dtype, device, block_len)


def try_sampling(kernel: CudaGumbelArgmax, dtype: torch.dtype, device: torch.device) -> None:
    """As ``try_out``, for the choice among logits of ``dtype`` alone."""
    with _failures(device):
        kernel.warm_up(dtype, device)


@contextmanager
def _failures(device: torch.device) -> Iterator[None]:
    try:
        yield
        synchronize(device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    # Triton raises RuntimeError or CalledProcessError where there is no C compiler for its launchers, or no driver.
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise KernelsUnavailable(f"{type(error).__name__}: {lines[-1][:300]}") from error


def _run_all(ops: CudaOps, config: DecoderConfig, dtype: torch.dtype, device: torch.device, block_len: int) -> None:
    c = config
    group = c.num_heads // c.num_kv_heads
    span_lens = [max(1, tile // group) for tile in TILES] if group else [1]  # DSpark's context projection has no query heads
    num_blocks = -(-max(span_lens) // block_len)
    cache = KvCache.allocate(replace(c, num_layers=1), num_blocks, dtype, device, block_len)
    frequencies = torch.tensor(inverse_frequencies(c), dtype=torch.float32)
    weight = torch.ones(c.hidden_size, device=device)
    head_weight = torch.ones(c.head_dim, device=device)
    norms = HeadNorms(head_weight, head_weight) if c.qk_norm else None
    table = np.arange(num_blocks, dtype=np.int32)
    ops.gumbel_argmax(np.arange(c.vocab_size)).warm_up(torch.float32, device)
    for span_len in span_lens:
        layout = lay_out([PackedSpan(0, (0,) * span_len, table)], block_len, frequencies, device)
        residual = torch.zeros(span_len, c.hidden_size, device=device)
        ops.add_norm(residual, None, weight)
        ops.add_norm(residual, residual.to(dtype, copy=True), weight)
        qkv = torch.zeros(span_len, c.q_size + 2 * c.kv_size, dtype=dtype, device=device)
        queries = ops.rotate_and_store(qkv, norms, layout, cache.keys[0], cache.values[0])
        if group:
            ops.attention(queries, layout, cache.keys[0], cache.values[0])
        ops.gate(torch.zeros(span_len, 2 * c.intermediate_size, dtype=dtype, device=device))
