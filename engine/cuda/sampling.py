"""Sampling on CUDA: two Triton kernels between one copy of parameters to the device and one of choices from it.

No operation waits for the device but the last copy, and their number depends on nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from engine.cuda.choose_kernel import choose_kernel
from engine.cuda.edit_kernel import peaks_kernel
from engine.cuda.packed_rows import Columns, PackedRows
from engine.device import to_device, to_host
from engine.noise import BLOCK_LEN
from engine.ops import RowChoices

if TYPE_CHECKING:
    from engine.sampling import SampleSpan


class Launch(Protocol):
    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> object:
        """Launches a Triton kernel over a grid. ``constants``: its constexprs and compiler options."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, **constants)


_PART = 128  # blocks of a program that finds peaks
_BLOCKS = 64  # blocks that a program reads at once, at most
_BOUNDS = 512  # bounds that it computes at once, at most
_NUM_WARPS = 8


class CudaGumbelArgmax:
    """``engine.ops.GumbelArgmax`` and ``engine.ops.FusedSampling``, exact: chooses what the CPU chooses.

    Not thread-safe: calls share memory. ``token_ids``: of the columns of the logits, ascending.
    """

    def __init__(self, token_ids: NDArray[np.int64], launch: Launch = launch) -> None:
        self._token_ids = np.ascontiguousarray(token_ids, np.int64)
        self._columns = Columns(self._token_ids)
        self.launch = launch
        self._num_columns = len(token_ids)
        blocks, starts = np.unique(self._token_ids // BLOCK_LEN, return_index=True)
        self._num_blocks = len(blocks)
        self._head_arrays = (np.append(starts, len(token_ids)).astype(np.int32), blocks, self._token_ids)
        self._head: tuple[torch.Tensor, ...] = ()  # the same on the device
        self._scratch = torch.empty(0)
        self._recorded: dict[int, torch.Tensor] = {}  # scratch that graphs write, by address

    def __call__(
        self,
        logits: torch.Tensor,
        keys: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        floors: NDArray[np.float32] | None = None,
        margins: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        rows = PackedRows(len(logits), self._num_columns)
        rows.set_noise(keys, temperatures)
        if floors is not None:
            rows.set_floors(floors)
        chosen = self._choose(logits, rows, wants_margin=margins is not None)
        if margins is not None:
            margins[:] = chosen.margins
        return chosen.token_ids, chosen.highest.astype(np.float32)

    def choose(
        self,
        logits: torch.Tensor,
        members: Sequence["SampleSpan"],
        keys: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        *,
        want_confidences: bool,
    ) -> RowChoices:
        rows = PackedRows(len(logits), self._num_columns)
        rows.set_noise(keys, temperatures)
        for member in members:
            rows.add(member, self._columns)
        return self._choose(logits, rows, wants_confidence=want_confidences)

    def _choose(
        self, logits: torch.Tensor, rows: PackedRows, *, wants_confidence: bool = False, wants_margin: bool = False
    ) -> RowChoices:
        packed = to_device(rows.buffer(), logits.device)
        found = self._launch_both(logits, packed, rows.num_edited, rows.num_filtered, wants_confidence, wants_margin)
        chosen, highest, confidences, values, margins = to_host(found).T
        return RowChoices(chosen.astype(np.int64), highest, confidences, values, margins)

    def warm_up(self, dtype: torch.dtype, device: torch.device) -> None:
        logits = torch.zeros(1, self._num_columns, dtype=dtype, device=device)
        records = self.records(np.zeros(1, np.int64), np.zeros(1, np.float32))
        self.choose_records(logits, to_device(records, device))

    def records(self, keys: NDArray[np.int64], temperatures: NDArray[np.float32]) -> NDArray[np.int64]:
        rows = PackedRows(len(keys), self._num_columns)
        rows.set_noise(keys, temperatures)
        return rows.buffer().reshape(len(keys), -1)

    def choose_records(self, logits: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        return self._launch_both(logits, records, 0, 0, True, True)

    def _launch_both(
        self,
        logits: torch.Tensor,
        packed: torch.Tensor,
        num_edited: int,
        num_filtered: int,
        wants_confidence: bool,
        wants_margin: bool,
    ) -> torch.Tensor:
        """What `choose_kernel` found. ``packed``: the buffer of ``PackedRows``, with so many edited and filtered rows."""
        if logits.stride(-1) != 1 or logits.shape[-1] < self._num_columns or not logits.is_floating_point():
            raise ValueError(f"logits of {logits.dtype} {tuple(logits.shape)}, {self._num_columns} columns are expected")
        device, num_rows = logits.device, len(logits)
        if not self._head or self._head[0].device != device:
            self._head = tuple(to_device(array, device) for array in self._head_arrays)
        starts, blocks, token_ids = self._head
        all_blocks = triton.next_power_of_2(self._num_blocks)
        num_edited *= self._num_columns
        num_likely = num_filtered * self._num_columns
        self._reserve(num_edited + num_likely + num_rows * self._num_blocks, device)
        found = torch.empty(num_rows, 5, dtype=torch.float64, device=device)
        self.launch(
            peaks_kernel,
            (num_rows, triton.cdiv(self._num_blocks, _PART)),
            logits,
            logits.stride(0),
            packed,
            starts,
            self._num_columns,
            self._num_blocks,
            self._scratch,
            num_edited + num_likely,
            PART=_PART,
            BLOCKS=min(_BLOCKS, all_blocks),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
        self.launch(
            choose_kernel,
            (num_rows,),
            logits,
            logits.stride(0),
            packed,
            starts,
            blocks,
            token_ids,
            self._num_columns,
            self._num_blocks,
            self._scratch,
            num_edited,
            num_edited + num_likely,
            found,
            int(wants_confidence),
            int(wants_margin),
            ALL_BLOCKS=all_blocks,
            BLOCKS=min(_BLOCKS, all_blocks),
            BOUNDS=min(_BOUNDS, all_blocks),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
        return found

    def _reserve(self, num: int, device: torch.device) -> None:
        """Memory for edited rows, likely tokens and peaks, one behind the other."""
        if len(self._scratch) < num or self._scratch.device != device:
            self._scratch = torch.empty(triton.next_power_of_2(num), device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._recorded[self._scratch.data_ptr()] = self._scratch
