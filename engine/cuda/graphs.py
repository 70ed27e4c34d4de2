"""CUDA graphs of small passes, which take less time than launching their kernels one by one.

Each row of a small pass is a span of its own. Keys and values of all rows are written before any row attends, so one graph
per padded number of rows serves every mixture of decode rows and verify spans.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch_layout import PackedSpan, pack
from engine.forward import CausalModel, PassStates
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig
from engine.models.weights import Weights
from engine.ops import Ops

PADDED_ROWS = (1, 2, 4, 8, 16, 32, 64)  # a token of each request of a drafter with its default capacity
_NUM_WARMUPS = 2  # passes before a capture, in which kernels are compiled and libraries choose algorithms
_CAPTURING = threading.Lock()  # a capture begins with a synchronisation, which another capture forbids


@dataclass(frozen=True, slots=True)
class _Captured:
    buffer: torch.Tensor  # the layout that the graph reads: overwritten before a replay
    table_width: int
    graph: torch.cuda.CUDAGraph
    states: PassStates  # of the padded rows, which it writes
    cache: KvCache  # kept alive, so that no other cache gets its address


class GraphedModel(CausalModel):
    """A ``CausalModel`` whose passes of at most 64 rows are replayed from graphs, captured when first needed. What
    ``forward`` returns is overwritten by its next call."""

    padded_rows = PADDED_ROWS

    def __init__(
        self, config: DecoderConfig, weights: Weights, ops: Ops, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__(config, weights, ops, dtype, device)
        # (padded rows, address of the keys, layers whose hidden states are wanted, stream) -> graph
        self._graphs: dict[tuple[int, int, tuple[int, ...], int], _Captured] = {}
        self._pool: Any = None  # of memory, shared by all graphs: one runs at a time

    @torch.inference_mode()
    def forward_with_hidden_states(self, spans: Sequence[PackedSpan], cache: KvCache, layers: tuple[int, ...]) -> PassStates:
        num_rows = sum(len(span.token_ids) for span in spans)
        if not 1 <= num_rows <= PADDED_ROWS[-1]:
            return super().forward_with_hidden_states(spans, cache, layers)
        padded_rows = next(padded for padded in PADDED_ROWS if padded >= num_rows)
        captured = self._captured(padded_rows, cache, layers)
        rows = rows_as_spans(spans)
        host = pack(
            rows,
            cache.block_len,
            self._inverse_frequencies,
            self.device,
            num_padding=padded_rows - num_rows,
            table_width=captured.table_width,
        )
        captured.buffer.copy_(host.buffer, non_blocking=True)
        captured.graph.replay()
        return PassStates(*(states[:num_rows] for states in captured.states))

    @torch.inference_mode()
    def warm_up(self, cache: KvCache) -> None:
        for num_rows in PADDED_ROWS:
            self._captured(num_rows, cache, ())

    def _captured(self, num_rows: int, cache: KvCache, layers: tuple[int, ...]) -> _Captured:
        # The kernels of a graph stay in the lane of its capture.
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        key = (num_rows, cache.keys.data_ptr(), layers, stream)
        if key not in self._graphs:
            self._graphs[key] = self._capture(num_rows, cache, layers)
        return self._graphs[key]

    def _capture(self, num_rows: int, cache: KvCache, layers: tuple[int, ...]) -> _Captured:
        width = min(cache.num_blocks, -(-self.config.max_len // cache.block_len))
        host = pack((), cache.block_len, self._inverse_frequencies, self.device, num_padding=num_rows, table_width=width)
        buffer = host.buffer.to(self.device, copy=True)
        layout = host.layout(buffer)
        graph, states = record(lambda: self._pass(layout, cache, layers), self.device, self._pool)
        self._pool = graph.pool()
        return _Captured(buffer, width, graph, states, cache)


def record(compute: Callable[[], PassStates], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, PassStates]:
    """Captures what ``compute`` launches; returns the graph and the tensors that a replay writes. Other threads may use the
    device meanwhile: the capture restricts only its own thread. The current stream is captured, unless it is the default
    one, which cannot be."""
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    stream = torch.cuda.Stream(device) if current == default else current
    with _CAPTURING:
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
