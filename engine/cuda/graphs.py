"""CUDA graphs of small passes: at few rows a pass is shorter than the launching of its kernels.

Every row of a small pass is laid out as a span of its own, at its own position, with its sequence's block table. Keys and
values of all rows are written before any row attends, so a verify span means the same cut into rows, and one graph per
padded number of rows serves every mixture of decode rows and verify spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.forward import CausalModel
from engine.kv_cache import KvCache
from engine.layout import Layout, PackedSpan
from engine.models.config import ModelConfig
from engine.models.weights import Weights
from engine.ops import Ops

PADDED_ROWS = (1, 2, 4, 8, 16, 32)
_NUM_WARMUPS = 2  # passes before a capture: kernels are compiled and libraries choose their algorithms


@dataclass(frozen=True, slots=True)
class _Captured:
    layout: Layout  # what the graph reads: to be overwritten before a replay
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # what it writes, [padded rows, hidden]
    features: torch.Tensor  # and [padded rows, layers * hidden]
    cache: KvCache  # held, lest another one come to lie at its address


class GraphedModel(CausalModel):
    """A ``CausalModel`` whose passes of at most 32 rows are replayed from graphs, captured when first needed.

    What ``forward`` returns is overwritten by its next call.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__(config, weights, ops, dtype, device)
        # (padded rows, address of the keys, layers whose hidden states are wanted) -> graph
        self._graphs: dict[tuple[int, int, tuple[int, ...]], _Captured] = {}
        self._pool: tuple[int, int] | None = None  # of memory, shared by all graphs: one runs at a time

    @torch.inference_mode()
    def forward_with_features(
        self, spans: Sequence[PackedSpan], cache: KvCache, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = sum(len(span.token_ids) for span in spans)
        if not 1 <= num_rows <= PADDED_ROWS[-1]:
            return super().forward_with_features(spans, cache, layers)
        layout = self.lay_out(rows_as_spans(spans), cache.block_len)
        captured = self._captured(next(padded for padded in PADDED_ROWS if padded >= num_rows), cache, layers)
        fill(captured.layout, layout)
        captured.graph.replay()
        return captured.hidden[:num_rows], captured.features[:num_rows]

    @torch.inference_mode()
    def _captured(self, num_rows: int, cache: KvCache, layers: tuple[int, ...]) -> _Captured:
        key = (num_rows, cache.keys.data_ptr(), layers)
        if key not in self._graphs:
            self._graphs[key] = self._capture(blank_layout(num_rows, self, cache), cache, layers)
        return self._graphs[key]

    def _capture(self, layout: Layout, cache: KvCache, layers: tuple[int, ...]) -> _Captured:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARMUPS):
                self._pass(layout, cache, layers)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden, features = self._pass(layout, cache, layers)
        self._pool = graph.pool()
        return _Captured(layout, graph, hidden, features, cache)


def rows_as_spans(spans: Sequence[PackedSpan]) -> list[PackedSpan]:
    """Every row as a span of one token."""
    return [
        PackedSpan(span.base_len + i, (token_id,), span.block_table)
        for span in spans
        for i, token_id in enumerate(span.token_ids)
    ]


def blank_layout(num_rows: int, model: CausalModel, cache: KvCache) -> Layout:
    """Rows of padding: they attend to position 0 of block 0, and are written nowhere."""
    width = min(cache.num_blocks, -(-model.config.max_len // cache.block_len))
    at = model.device
    return Layout(
        token_ids=torch.zeros(num_rows, dtype=torch.int64, device=at),
        positions=torch.zeros(num_rows, dtype=torch.int64, device=at),
        slots=torch.full((num_rows,), -1, dtype=torch.int64, device=at),
        starts=torch.arange(num_rows + 1, dtype=torch.int32, device=at),
        base_lens=torch.zeros(num_rows, dtype=torch.int32, device=at),
        tables=torch.zeros(num_rows, width, dtype=torch.int32, device=at),
        cos=torch.zeros(num_rows, model.config.head_dim // 2, device=at),
        sin=torch.zeros(num_rows, model.config.head_dim // 2, device=at),
        max_span_len=1,
    )


def fill(padded: Layout, layout: Layout) -> None:
    """Writes ``layout``, one row a span, into the first rows of ``padded``; the rest becomes padding."""
    num_rows = layout.num_rows
    for name in ("token_ids", "positions", "slots", "base_lens", "cos", "sin"):
        getattr(padded, name)[:num_rows].copy_(getattr(layout, name), non_blocking=True)
    padded.tables[:num_rows, : layout.tables.shape[1]].copy_(layout.tables, non_blocking=True)
    padded.slots[num_rows:].fill_(-1)
    padded.base_lens[num_rows:].zero_()
