"""Attention of a packed pass in rectangular tensors, for engines that need them (SPIN, section V.A). The ragged kernels of
`engine/cpu` and `engine/cuda` make it unnecessary here; `outrider bench packing` compares them.

Padding gives each sequence a row of the KV tensor as long as the longest:

    A A A A A A        Request decomposition cuts long sequences        A A A
    B B . . . .        into pieces of L positions, whose queries        A A A
    C C C . . .        are replicated                                   B B .    and C C C
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch_layout import Layout
from engine.models.config import DecoderConfig
from engine.ops import TorchOps

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A KV tensor of ``len(owners)`` rows and ``num_blocks`` blocks each. Row b holds blocks ``firsts[b]`` and following of
    sequence ``owners[b]``, which ascend."""

    num_blocks: int
    owners: Ints
    firsts: Ints

    @property
    def num_cells(self) -> int:
        """Blocks of the tensor, padding included."""
        return self.num_blocks * len(self.owners)


def padded(lens: Ints) -> Pieces:
    """A row for each sequence. ``lens`` in blocks, each at least 1."""
    return Pieces(int(lens.max()), np.arange(len(lens)), np.zeros(len(lens), np.int64))


def decomposed(lens: Ints, max_rows: int) -> Pieces:
    """The length of pieces that pads least, of those that need at most ``max_rows`` rows; the longest of equals, which
    replicates fewest queries.

    ``lens`` in blocks, each at least 1. ``max_rows``: at least the number of sequences.
    """
    if max_rows < len(lens):
        raise ValueError(f"{len(lens)} sequences need as many rows of the KV tensor, got at most {max_rows}")
    candidates = np.arange(1, int(lens.max()) + 1)
    num_rows = (-(-lens[None, :] // candidates[:, None])).sum(1)
    cells = np.where(num_rows <= max_rows, candidates * num_rows, np.iinfo(np.int64).max)
    best = int(candidates[np.flatnonzero(cells == cells.min())[-1]])
    num_pieces = -(-lens // best)
    owners = np.repeat(np.arange(len(lens)), num_pieces)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    return Pieces(best, owners, within * best)


class RectangularOps(TorchOps):
    """Torch operators whose attention multiplies rectangular tensors. ``rows_per_sequence``: the most rows of the KV tensor
    that decomposition uses, on average; 1 pads every sequence to the longest."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, rows_per_sequence: float = 1.0) -> None:
        super().__init__(config, dtype)
        self._rows_per_sequence = rows_per_sequence
        self._planned: tuple[Layout, _Plan] | None = None  # of the pass, which every layer shares

    def attention(self, queries: torch.Tensor, layout: Layout, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self._planned is None or self._planned[0] is not layout:
            self._planned = layout, _plan(layout, keys.shape[3], self._rows_per_sequence)
        plan, c = self._planned[1], self._config
        num_pieces = len(plan.tables)
        group = c.num_heads // c.num_kv_heads
        k = keys[plan.tables].permute(0, 2, 3, 1, 4).reshape(num_pieces * c.num_kv_heads, c.head_dim, -1).float()
        v = values[plan.tables].permute(0, 2, 1, 3, 4).reshape(num_pieces * c.num_kv_heads, -1, c.head_dim).float()
        num_queries = plan.rows.shape[1]
        q = queries[plan.rows].float().view(num_pieces, num_queries, c.num_kv_heads, group, c.head_dim)
        q = q.transpose(1, 2).reshape(num_pieces * c.num_kv_heads, num_queries * group, c.head_dim)
        scores = torch.bmm(q, k).view(num_pieces, c.num_kv_heads, num_queries, group, -1)
        scores = scores.masked_fill_(plan.is_later[:, None, :, None, :], -math.inf)
        peaks = scores.amax(-1)  # [pieces, kv_heads, queries, group]; -inf where a piece lies behind the query
        weights = scores.sub_(peaks.clamp_min(torch.finfo(peaks.dtype).min)[..., None]).exp_()
        sums = weights.sum(-1)
        out = torch.bmm(weights.view(num_pieces * c.num_kv_heads, num_queries * group, -1), v)
        out = out.view(num_pieces, c.num_kv_heads, num_queries, group, c.head_dim)
        if num_pieces > layout.num_spans:
            out, sums = _merged(out, sums, peaks, plan.owners, layout.num_spans)
        out = (out / sums[..., None]).transpose(1, 2).reshape(layout.num_spans, num_queries, c.q_size)
        return out[plan.is_query].to(self._dtype)


@dataclass(frozen=True, slots=True)
class _Plan:
    owners: torch.Tensor  # [pieces]
    tables: torch.Tensor  # [pieces, blocks] of the cache
    rows: torch.Tensor  # [pieces, queries] of the pass; short spans repeat their last row
    is_later: torch.Tensor  # [pieces, queries, positions]: behind the query
    is_query: torch.Tensor  # [spans, queries]


def _plan(layout: Layout, block_len: int, rows_per_sequence: float) -> _Plan:
    device = layout.tables.device
    starts, base_lens = layout.starts.cpu().numpy().astype(np.int64), layout.base_lens.cpu().numpy().astype(np.int64)
    span_lens = np.diff(starts)
    lens = -(-(base_lens + span_lens) // block_len)
    max_rows = max(len(lens), int(rows_per_sequence * len(lens)))
    pieces = padded(lens) if max_rows == len(lens) else decomposed(lens, max_rows)
    owners = pieces.owners
    blocks = pieces.firsts[:, None] + np.arange(pieces.num_blocks)
    tables = layout.tables.cpu().numpy()
    tables = np.take_along_axis(tables[owners], np.minimum(blocks, tables.shape[1] - 1), axis=1)
    queries = np.arange(span_lens.max())
    rows = starts[:-1, None] + np.minimum(queries, span_lens[:, None] - 1)
    query_positions = (base_lens[:, None] + np.minimum(queries, span_lens[:, None] - 1))[owners]
    positions = pieces.firsts[:, None] * block_len + np.arange(pieces.num_blocks * block_len)
    is_later = positions[:, None, :] > query_positions[:, :, None]
    arrays = owners, tables.astype(np.int64), rows[owners], is_later, queries < span_lens[:, None]
    return _Plan(*[torch.from_numpy(array).to(device) for array in arrays])


def _merged(
    out: torch.Tensor, sums: torch.Tensor, peaks: torch.Tensor, owners: torch.Tensor, num_spans: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the pieces of a sequence (SPIN, equation 13), each relative to the highest score of all its pieces."""
    index = owners.view(-1, 1, 1, 1).expand_as(peaks)
    shape = (num_spans, *peaks.shape[1:])
    highest = peaks.new_full(shape, -math.inf).scatter_reduce(0, index, peaks, "amax")
    factors = (peaks - highest[owners]).exp()
    sums = sums.new_zeros(shape).index_add(0, owners, sums * factors)
    return out.new_zeros(num_spans, *out.shape[1:]).index_add(0, owners, out * factors[..., None]), sums
