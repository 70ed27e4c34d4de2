"""Index tensors of a packed pass: the span, position and KV cache slot of each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device import to_device


@dataclass(frozen=True, slots=True)
class PackedSpan:
    """Consecutive tokens of one sequence. Positions before ``base_len`` are in the cache already. ``block_table`` (int32)
    covers positions 0 .. base_len + len(token_ids)."""

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

    def keep(self, staying: "StayingRows") -> "Layout":
        """The layout without the rows that leave the pass."""
        rows, lens = staying.rows, staying.span_lens
        starts = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(lens, out=starts[1:])
        return Layout(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            starts=to_device(starts, self.starts.device),
            base_lens=self.base_lens,
            tables=self.tables,
            cos=self.cos[rows],
            sin=self.sin[rows],
            max_span_len=int(lens.max()),
        )

    @property
    def num_spans(self) -> int:
        return self.base_lens.shape[0]


@dataclass(frozen=True, slots=True)
class StayingRows:
    """The rows of a layout that go on when others leave: the first ones of each span, at least one."""

    rows: torch.Tensor  # int64, ascending, on the layout's device
    span_lens: NDArray[np.int64]  # [spans]

    @classmethod
    def of(cls, starts: NDArray[np.int64], span_lens: NDArray[np.int64], device: torch.device) -> "StayingRows":
        """The first ``span_lens`` rows of the spans that begin at ``starts``, both [spans]."""
        ends = np.cumsum(span_lens)
        rows = np.arange(ends[-1]) + np.repeat(starts - (ends - span_lens), span_lens)
        return cls(to_device(rows, device), span_lens)


def lay_out(spans: Sequence[PackedSpan], block_len: int, inverse_frequencies: torch.Tensor, device: torch.device) -> Layout:
    """The layout of a pass on ``device``. A GPU gets it in one asynchronous copy. ``spans``: at least one, each of at least
    one token. ``inverse_frequencies``: fp32 [head_dim / 2], on the CPU."""
    if device.type == "cpu":
        return _on_host(spans, block_len, inverse_frequencies)
    host = pack(spans, block_len, inverse_frequencies, device)
    return host.layout(host.buffer.to(device, non_blocking=True))


_ALIGNMENT = 64  # bytes; Triton compiles a kernel once more for pointers that are not multiples of 16


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The tensors of a ``Layout`` in one host buffer, so that one copy moves them to a device."""

    buffer: torch.Tensor  # uint8
    parts: tuple[tuple[str, torch.dtype, torch.Size], ...]  # in the order of the buffer, each aligned
    max_span_len: int

    def layout(self, buffer: torch.Tensor) -> Layout:
        """Views of ``buffer``, which holds the same bytes on any device."""
        views, offset = {}, 0
        for name, dtype, shape in self.parts:
            num_bytes = shape.numel() * dtype.itemsize
            views[name] = buffer[offset : offset + num_bytes].view(dtype).view(shape)
            offset += _aligned(num_bytes)
        return Layout(**views, max_span_len=self.max_span_len)


def pack(
    spans: Sequence[PackedSpan],
    block_len: int,
    inverse_frequencies: torch.Tensor,
    device: torch.device,
    *,
    num_padding: int = 0,
    table_width: int | None = None,
) -> HostLayout:
    """The layout of a pass in host memory, which is pinned if ``device`` is a GPU.

    Args:
        spans: each of at least one token; at least one, or padding.
        inverse_frequencies: fp32 [head_dim / 2], on the CPU.
        num_padding: rows appended to those of the spans, each a span of its own that attends to position 0 of block 0;
            their keys and values are not written (slot -1).
        table_width: of the block tables; None: as the longest span needs.
    """
    layout = _on_host(spans, block_len, inverse_frequencies, num_padding, table_width)
    tensors = {name: getattr(layout, name) for name in _TENSORS}
    num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = HostLayout(buffer, tuple((name, t.dtype, t.shape) for name, t in tensors.items()), layout.max_span_len)
    views = host.layout(buffer)
    for name, tensor in tensors.items():
        getattr(views, name).copy_(tensor)
    return host


_TENSORS = tuple(field.name for field in dataclass_fields(Layout) if field.name != "max_span_len")


def _on_host(
    spans: Sequence[PackedSpan],
    block_len: int,
    inverse_frequencies: torch.Tensor,
    num_padding: int = 0,
    table_width: int | None = None,
) -> Layout:
    num_spans = len(spans)
    lens = np.fromiter((len(span.token_ids) for span in spans), np.int64, num_spans)
    base_lens = np.fromiter((span.base_len for span in spans), np.int64, num_spans)
    if not num_spans + num_padding or lens.min(initial=1) < 1:
        raise ValueError(f"a pass needs spans of at least one token, got lengths {lens.tolist()}")
    num_rows = int(lens.sum())
    starts = np.arange(num_rows - num_spans, num_rows + num_padding + 1)  # right behind the spans, where padding begins
    starts[0] = 0
    np.cumsum(lens, out=starts[1 : num_spans + 1])
    num_blocks = -(-(base_lens + lens) // block_len)
    width = int(num_blocks.max(initial=1)) if table_width is None else table_width
    tables = np.zeros((num_spans + num_padding, width), np.int32)
    for row, span, num in zip(tables, spans, num_blocks.tolist(), strict=False):
        row[:num] = span.block_table[:num]
    token_ids = np.fromiter(chain.from_iterable(span.token_ids for span in spans), np.int64, num_rows)
    span_of_row = np.repeat(np.arange(num_spans), lens)
    positions = np.arange(num_rows) + (base_lens - starts[:num_spans])[span_of_row]
    slots = tables[span_of_row, positions // block_len].astype(np.int64) * block_len + positions % block_len
    if num_padding:
        token_ids, positions, base_lens = (np.pad(x, (0, num_padding)) for x in (token_ids, positions, base_lens))
        slots = np.pad(slots, (0, num_padding), constant_values=-1)
    at = torch.from_numpy(positions)
    angles = at[:, None].float() * inverse_frequencies
    return Layout(
        token_ids=torch.from_numpy(token_ids),
        positions=at,
        slots=torch.from_numpy(slots),
        starts=torch.from_numpy(starts.astype(np.int32)),
        base_lens=torch.from_numpy(base_lens.astype(np.int32)),
        tables=torch.from_numpy(tables),
        cos=angles.cos(),
        sin=angles.sin(),
        max_span_len=int(lens.max(initial=1)),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
