"""CUDA graphs of what is launched again and again: small passes, and rounds of drafts. Launching their kernels one by one
takes longer.

Each row of a small pass is a span of its own. Keys and values of all rows are written before any row attends, so one graph
per padded number of rows serves every mixture of decode rows and verify spans.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.batch_layout import PackedSpan, pack
from engine.forward import CausalModel, PassStates, RowWatch
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig
from engine.models.weights import Weights
from engine.ops import Ops, Recordable

PADDED_ROWS = (1, 2, 4, 8, 16, 32, 64)  # a token of each request of a drafter with its default capacity
_NUM_WARMUPS = 2  # passes before a capture, in which kernels are compiled and libraries choose algorithms
_CAPTURING = threading.Lock()  # a capture begins with a synchronisation, which another capture forbids
_stream_of = cache(lambda device: torch.cuda.Stream(device))  # torch keeps memory apart by stream, and has 32, in turn


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: Sequence[Tensor]  # that the graph reads: overwritten before a replay
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]  # that it writes
    compute: Recordable  # whose tensors are kept alive, so that no others get their addresses


class CudaGraphs:
    """``engine.ops.Graphs``. All share one pool of memory, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[tuple[Hashable, int], _Captured] = {}  # by key and stream
        self._pool: Any = None

    @property
    def sizes(self) -> Sequence[int]:
        return PADDED_ROWS

    def padded(self, num: int) -> int | None:
        return next((padded for padded in PADDED_ROWS if padded >= num > 0), None)

    def run(self, key: Hashable, inputs: Sequence[Tensor], compute: Recordable) -> tuple[Tensor, ...]:
        captured = self.capture(key, inputs, compute)
        for buffer, given in zip(captured.inputs, inputs, strict=True):
            buffer.copy_(given, non_blocking=True)
        captured.graph.replay()
        return captured.outputs

    def capture(self, key: Hashable, inputs: Sequence[Tensor], compute: Recordable) -> _Captured:
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        if (key, stream) not in self._captured:
            buffers = [given.to(self._device, copy=True, non_blocking=True) for given in inputs]
            graph, outputs = record(lambda: compute(buffers), self._device, self._pool)
            self._pool = graph.pool()
            self._captured[key, stream] = _Captured(buffers, graph, outputs, compute)
        return self._captured[key, stream]


class GraphedModel(CausalModel):
    """A ``CausalModel`` whose passes of at most 64 rows are replayed from graphs. What ``forward`` returns is overwritten by
    its next call."""

    padded_rows = PADDED_ROWS

    def __init__(
        self, config: DecoderConfig, weights: Weights, ops: Ops, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__(config, weights, ops, dtype, device)
        self._graphs = CudaGraphs(self.device)

    @torch.inference_mode()
    def forward_with_hidden_states(self, spans: Sequence[PackedSpan], cache: KvCache, layers: tuple[int, ...]) -> PassStates:
        num_rows = sum(len(span.token_ids) for span in spans)
        padded_rows = self._graphs.padded(num_rows)
        if padded_rows is None:
            return super().forward_with_hidden_states(spans, cache, layers)
        states = self._graphs.run(*self._replayed(rows_as_spans(spans), padded_rows, cache, layers))
        return PassStates(*(x[:num_rows] for x in states))

    def forward_watched(
        self, spans: Sequence[PackedSpan], cache: KvCache, layers: tuple[int, ...], watch: RowWatch
    ) -> PassStates:
        """A pass that rows may leave replays no graph; one that is only timed is a plain one."""
        if watch.depths:
            return super().forward_watched(spans, cache, layers, watch)
        return self.forward_with_hidden_states(spans, cache, layers)

    @torch.inference_mode()
    def warm_up(self, cache: KvCache) -> None:
        for num_rows in PADDED_ROWS:
            self._graphs.capture(*self._replayed((), num_rows, cache, ()))

    def _replayed(
        self, rows: Sequence[PackedSpan], padded_rows: int, cache: KvCache, layers: tuple[int, ...]
    ) -> tuple[Hashable, Sequence[Tensor], Recordable]:
        num, width = padded_rows - len(rows), min(cache.num_blocks, -(-self.config.max_len // cache.block_len))
        host = pack(rows, cache.block_len, self._inverse_frequencies, self.device, num_padding=num, table_width=width)
        key = (padded_rows, cache.keys.data_ptr(), layers)
        return key, (host.buffer,), lambda buffers: self._pass(host.layout(buffers[0]), cache, layers)


def record(
    compute: Callable[[], tuple[Tensor, ...]], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Captures what ``compute`` launches; returns the graph and the tensors that a replay writes. Other threads may use the
    device meanwhile: the capture restricts only its own thread. The current stream is captured, and in place of the default
    one, which cannot be, always the same other one."""
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    with _CAPTURING:
        stream = _stream_of(device) if current == default else current
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARMUPS):
                compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = compute()
    return graph, outputs


def rows_as_spans(spans: Sequence[PackedSpan]) -> list[PackedSpan]:
    """Every row as a span of one token."""
    return [
        PackedSpan(span.base_len + i, (token_id,), span.block_table)
        for span in spans
        for i, token_id in enumerate(span.token_ids)
    ]
