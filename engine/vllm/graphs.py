"""CUDA graphs for batches whose lengths differ by request."""

from typing import Any

from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport


class AnyLengths(CompilationConfig):
    """Captures full graphs that serve any lengths where the attention backends allow it, instead of full ones for a uniform
    batch beside piecewise ones. vLLM knows the backends, and asks, when the model is loaded."""

    cudagraph_mode: CUDAGraphMode

    def resolve_cudagraph_mode_and_sizes(
        self, min_cg_support: AttentionCGSupport, backend: str | None, uniform_len: int = 1, **more: Any
    ) -> CUDAGraphMode:
        if min_cg_support is AttentionCGSupport.ALWAYS and self.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
            self.cudagraph_mode = CUDAGraphMode.FULL
            uniform_len = 1  # else sizes become multiples of the longest span, for batches in which all have it
        return super().resolve_cudagraph_mode_and_sizes(min_cg_support, backend, uniform_len, **more)


def capture_any_lengths(config: VllmConfig) -> None:
    """Of a worker, before it makes its runner."""
    config.compilation_config.__class__ = AnyLengths


def prepared_rows(config: CompilationConfig, max_pass_tokens: int) -> tuple[int, ...]:
    """As of `router.plan.Capacity`: the sizes of the graphs."""
    sizes = config.cudagraph_capture_sizes or () if config.cudagraph_mode else ()
    return tuple([rows for rows in sizes if rows <= max_pass_tokens])
