"""Where the checks run: on a GPU, or on the CPU with Triton interpreting, which shows that they can run."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from drafters.hidden_states import block_stage, sequential, stage
from engine import factory
from engine.cuda.graphs import CudaGraphs, GraphedModel
from engine.cuda.ops import CudaOps
from engine.cuda.sampling import CudaGumbelArgmax
from engine.models.config import DecoderConfig
from engine.ops import Ops
from tests.support.recorded_graphs import use_recorded_graphs


class Place:
    """``name``: cuda or cpu. On the CPU Triton must interpret, and graphs are computed again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device(name)
        self.is_gpu = name == "cuda"
        self.dtypes = (torch.float32, torch.bfloat16) if self.is_gpu else (torch.float32,)
        if not self.is_gpu:
            use_recorded_graphs(setattr)

    @contextmanager
    def loading(self) -> Iterator[str]:
        """The device's name; what is loaded on it meanwhile gets the operators of a GPU, also on the CPU."""
        if self.is_gpu:
            yield self.name
            return

        def make_ops(config: DecoderConfig, dtype: torch.dtype, *_: object, **__: object) -> Ops:
            return CudaOps(config, dtype)

        with ExitStack() as patches:
            for module in (factory, block_stage, stage, sequential):
                patches.enter_context(mock.patch.object(module, "make_ops", make_ops))
            patches.enter_context(mock.patch.object(sequential, "make_graphs", CudaGraphs))
            patches.enter_context(mock.patch.object(factory, "CausalModel", lambda *args: GraphedModel(*args[:5])))
            yield self.name

    def sampling_kernel(self, vocab_size: int, dtype: torch.dtype) -> CudaGumbelArgmax:
        if not self.is_gpu:
            return CudaGumbelArgmax(np.arange(vocab_size))
        kernel = factory.make_gumbel_argmax(vocab_size, dtype, self.device)
        assert isinstance(kernel, CudaGumbelArgmax)
        return kernel

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        """Raises at any wait for the GPU but an explicit one."""
        if self.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.is_gpu:
                torch.cuda.set_sync_debug_mode("default")

    def facts(self) -> dict[str, Any]:
        import triton

        found: dict[str, Any] = {"device": "interpreted on a CPU", "torch": torch.__version__, "triton": triton.__version__}
        if self.is_gpu:
            of = torch.cuda.get_device_properties(self.device)
            found |= {
                "device": of.name,
                "capability": f"{of.major}.{of.minor}",
                "memory_gb": round(of.total_memory / 2**30, 1),
            }
        return found
