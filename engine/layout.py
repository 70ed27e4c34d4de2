"""The geometry of one packed pass: which rows belong to which span, where they stand, and where their keys lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PackedSpan:
    """Consecutive tokens of one sequence. Positions before ``base_len`` are in the cache already.

    ``block_table`` (int32) covers positions 0 .. base_len + len(token_ids).
    """

    base_len: int
    token_ids: Sequence[int]
    block_table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """All spans of a pass, on its device. Row ``r`` of span ``s`` is ``starts[s] + r``, at position ``base_lens[s] + r``."""

    token_ids: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows], block * block_len + offset: where the row's key and value go
    starts: torch.Tensor  # int32 [spans + 1]
    base_lens: torch.Tensor  # int32 [spans]
    tables: torch.Tensor  # int32 [spans, width], padded with zeros
    cos: torch.Tensor  # fp32 [rows, head_dim / 2]
    sin: torch.Tensor
    max_span_len: int

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_spans(self) -> int:
        return self.base_lens.shape[0]


def lay_out(spans: Sequence[PackedSpan], block_len: int, inverse_frequencies: torch.Tensor, device: torch.device) -> Layout:
    """Args:
    spans: at least one, each of at least one token.
    inverse_frequencies: fp32 [head_dim / 2], on the CPU.
    """
    num_spans = len(spans)
    lens = np.fromiter((len(span.token_ids) for span in spans), np.int64, num_spans)
    base_lens = np.fromiter((span.base_len for span in spans), np.int64, num_spans)
    if not num_spans or lens.min() < 1:
        raise ValueError(f"a pass needs spans of at least one token, got lengths {lens.tolist()}")
    starts = np.zeros(num_spans + 1, np.int64)
    np.cumsum(lens, out=starts[1:])
    num_rows = int(starts[-1])
    num_blocks = -(-(base_lens + lens) // block_len)
    tables = np.zeros((num_spans, int(num_blocks.max())), np.int32)
    for row, span, num in zip(tables, spans, num_blocks.tolist(), strict=True):
        row[:num] = span.block_table[:num]
    token_ids = np.fromiter(chain.from_iterable(span.token_ids for span in spans), np.int64, num_rows)
    span_of_row = np.repeat(np.arange(num_spans), lens)
    positions = np.arange(num_rows) + (base_lens - starts[:-1])[span_of_row]
    slots = tables[span_of_row, positions // block_len].astype(np.int64) * block_len + positions % block_len
    at = torch.from_numpy(positions)
    angles = at[:, None].float() * inverse_frequencies
    return Layout(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=at.to(device),
        slots=torch.from_numpy(slots).to(device),
        starts=torch.from_numpy(starts.astype(np.int32)).to(device),
        base_lens=torch.from_numpy(base_lens.astype(np.int32)).to(device),
        tables=torch.from_numpy(tables).to(device),
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
        max_span_len=int(lens.max()),
    )
