"""Compiles the Triton kernels for a GPU that is not there, through the code that launches them.

Triton asks its driver for the target of a launch. The one here names an architecture and has no device, so
``kernel.warmup`` specialises the arguments as a launch would, compiles to PTX and cubin, and stops there. Triton is imported
in a worker process alone: in this one it may be set to interpret."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from engine.models.config import DecoderConfig, RopeConfig

# Shared memory that a block can have, in bytes: NVIDIA, CUDA C++ Programming Guide, technical specifications.
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FACTORS: dict[str, tuple[Any, ...]] = {
    "arch": tuple(SHARED_BYTES),
    "dtype": tuple(DTYPES),
    "head_dim": (64, 80, 96, 128, 256),
    "heads": ((4, 4), (9, 3), (14, 2), (32, 4), (0, 2)),  # of queries, of keys; without queries: DSpark's context
    "block_len": (16, 32, 64),
    "qk_norm": (False, True),
    "hidden_size": (576, 4098),
}


@dataclass(frozen=True, slots=True)
class Case:
    arch: int
    dtype: str
    head_dim: int
    heads: tuple[int, int]
    block_len: int
    qk_norm: bool
    hidden_size: int

    @property
    def config(self) -> DecoderConfig:
        num_heads, num_kv_heads = self.heads
        return DecoderConfig(
            architecture="qwen3",
            vocab_size=1000,
            hidden_size=self.hidden_size,
            intermediate_size=1536,
            num_layers=1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-6,
            rope=RopeConfig(10000.0),
            max_len=4096,
            tied_embeddings=True,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            qk_norm=self.qk_norm,
            eos_token_ids=(0,),
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    shared_bytes: int
    cubin_bytes: int


def cases() -> list[Case]:
    """A few of all cases that hold every pair of values, on sm_90 every dtype with every head_dim, and what takes most
    shared memory on the architecture that has least."""
    attends = ("attends", True)
    wanted = {frozenset([(a, x), (b, y)]) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])}
    wanted |= {
        frozenset([("arch", 90), ("dtype", dtype), ("head_dim", head_dim), attends])
        for dtype, head_dim in product(FACTORS["dtype"], FACTORS["head_dim"])
    }
    wanted.add(frozenset([("arch", 89), ("dtype", "float32"), ("head_dim", 256), ("block_len", 64), attends]))
    everything = [Case(*values) for values in product(*FACTORS.values())]
    chosen = []
    held = {case: frozenset([*asdict(case).items(), ("attends", case.heads[0] > 0)]) for case in everything}
    while wanted:
        best = max(everything, key=lambda case: sum(need <= held[case] for need in wanted))
        wanted = {need for need in wanted if not need <= held[best]}
        chosen.append(best)
    return chosen


def begin_worker(variables: Mapping[str, str]) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(variables)


def compile_all(case: Case, device: int = 0) -> list[Compiled]:
    """Every kernel that a model of this shape launches.

    Args:
        device: a process keeps kernels by device, and compiles for a new one again.

    Raises:
        KernelsUnavailable: one cannot be compiled.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from engine.cuda import exit_scores
    from engine.cuda.compile_check import try_out
    from engine.cuda.ops import CudaOps
    from engine.exit_lens import spread_vocabularies
    from engine.exit_rows import WatchedRows

    class NoDevice:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", case.arch, 32)

        def get_current_device(self) -> int:
            return 1000 * device + case.arch

        def get_current_stream(self, device: int) -> int:
            return 0

    found = []

    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **constants)
        found.append(Compiled(kernel.__name__, compiled.metadata.shared, len(compiled.asm["cubin"])))

    driver.set_active(NoDevice())
    dtype, meta = DTYPES[case.dtype], torch.device("meta")
    ops = CudaOps(case.config, dtype, compile_only)
    try_out(ops, case.config, dtype, meta, case.block_len)
    *_, token_ids = spread_vocabularies(65_536 if dtype == torch.bfloat16 else 1000, 1024)  # 1,024 blocks take long, 16 less
    head = torch.empty(65_536, case.hidden_size, dtype=dtype, device=meta)
    model = SimpleNamespace(config=case.config, dtype=dtype, ops=ops)
    scores = exit_scores.DeviceScores(model, head, token_ids, ops.gumbel_argmax(token_ids), exit_scores.InTurn())
    residual, ints = torch.empty(4, case.hidden_size, device=meta), np.arange(2)
    for given in ((residual.to(dtype), None), (residual, residual.to(dtype))):
        with patch.object(exit_scores, "begin_to_host", lambda scored: scored):
            scores.begin(*given, None, WatchedRows(ints, ints, ints, ints, ints, np.ones(2, np.float32)))
    return found


def refusal(case: Case, assembler: str, cache: str) -> str:
    """What ``try_out`` raises where ``assembler`` stands for NVIDIA's."""
    from triton import knobs

    from engine.cuda.compile_check import KernelsUnavailable

    with knobs.nvidia.scope(), knobs.cache.scope():
        knobs.nvidia.ptxas = assembler
        knobs.cache.dir = cache
        try:
            compile_all(case, device=1)
        except KernelsUnavailable as error:
            return str(error)
    return ""
