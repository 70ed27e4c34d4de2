"""Early exit on a GPU: margins of draft tokens, estimated beside the pass (FASER, 4.2).

    stream of the pass   ... layer | watched rows, normalised | layer | layer | rows leave ...
    stream beside it                                          | lens, reduced head, choice, copy to the host |

The thread that launches the pass waits for the copy, ``LAG`` layers later, while the device still has those to compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from engine.cuda.exit_kernels import draft_logit_kernel, watched_norm_kernel
from engine.cuda.sampling import CudaGumbelArgmax
from engine.device import begin_to_host, to_device
from engine.exit_lens import Margins, margins_of
from engine.exit_rows import WatchedRows
from engine.forward import CausalModel
from engine.models.weights import LinearWeight
from engine.ops import Linear


class Launched(Protocol):
    def wait(self) -> float:
        """Waits until the device has computed all that was launched; returns the seconds that it took there."""


class Beside(Protocol):
    @contextmanager
    def after(self, *given: torch.Tensor) -> Iterator[Launched]:
        """Operations launched within run beside the caller's stream, after all that it holds so far. ``given``: every
        tensor of the caller's stream that they read."""


@dataclass(frozen=True, slots=True)
class _Events:
    start: torch.cuda.Event
    end: torch.cuda.Event

    def wait(self) -> float:
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3


class SideStream:
    """``Beside`` on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def after(self, *given: torch.Tensor) -> Iterator[_Events]:
        events = _Events(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in given:
            tensor.record_stream(self._stream)  # its memory is not taken again before
        with torch.cuda.stream(self._stream):
            events.start.record()
            yield events
            events.end.record()


class InTurn:
    """``Beside`` on any device: within the pass."""

    @contextmanager
    def after(self, *given: torch.Tensor) -> Iterator["InTurn"]:
        yield self

    def wait(self) -> float:
        return 0.0


class DeviceScores:
    """``engine.exit_lens.ExitScores`` over ``token_ids``, ascending. ``head``: of the whole model, on its device."""

    def __init__(
        self, model: CausalModel, head: torch.Tensor, token_ids: NDArray[np.int64], kernel: CudaGumbelArgmax, beside: Beside
    ) -> None:
        self._rows, self._kernel, self._beside = head, kernel, beside
        self._dtype, self._eps = model.dtype, model.config.norm_eps
        reduced = head.index_select(0, to_device(token_ids, head.device))
        self._head = model.ops.linear(LinearWeight(reduced.to(model.dtype)))

    def begin(
        self, residual: torch.Tensor, delta: torch.Tensor | None, lens: Linear | None, rows: WatchedRows
    ) -> "DeviceMargins":
        places = to_device(np.stack([rows.at, rows.drafts]), residual.device)
        records = to_device(self._kernel.records(rows.keys, rows.temperatures), residual.device)
        hidden = self._watched(residual, delta, places)
        with self._beside.after(hidden, places, records) as launched:
            x = hidden if lens is None else lens(hidden)
            found = self._kernel.choose_records(self._head(x), records)
            return DeviceMargins(rows, begin_to_host(self._scored(x, places, found)), launched)

    def warm_up(self) -> None:
        """Compiles the kernels, which takes seconds: the first check shall not wait for it."""
        ints, residual = np.zeros(2, np.int64), torch.zeros(2, self._rows.shape[1], device=self._rows.device)
        x = residual.to(self._dtype)
        for hidden, delta in ((x, None), (residual, x)):  # after the last layer, and after others
            self.begin(hidden, delta, None, WatchedRows(ints, ints, ints, ints, ints, np.ones(2, np.float32))).wait()

    def _watched(self, residual: torch.Tensor, delta: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
        """Hidden states of the watched rows at unit scale, [rows, hidden] in the dtype. ``places``: their rows of the pass,
        and their draft tokens, int64 [2, rows]."""
        size, num_rows = residual.shape[1], places.shape[1]
        out = torch.empty(num_rows, size, dtype=self._dtype, device=residual.device)
        self._kernel.launch(
            watched_norm_kernel,
            (num_rows,),
            residual,
            residual if delta is None else delta,
            places,
            out,
            size,
            self._eps,
            HAS_DELTA=delta is not None,
            WIDTH=triton.next_power_of_2(size),
        )
        return out

    def _scored(self, x: torch.Tensor, places: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """fp64 [rows, 3]: the best token of the reduced vocabulary, its logit, and that of the draft token."""
        size, width = x.shape[1], triton.next_power_of_2(x.shape[1])
        out = torch.empty(len(x), 3, dtype=torch.float64, device=x.device)
        self._kernel.launch(
            draft_logit_kernel, (len(x),), x, self._rows, places, found, out, size, FOUND=found.shape[1], WIDTH=width
        )
        return out


@dataclass(frozen=True, slots=True)
class DeviceMargins:
    """``engine.exit_lens.PendingMargins``."""

    rows: WatchedRows
    scored: torch.Tensor  # on the host, once the wait is over
    launched: Launched

    def wait(self) -> Margins:
        seconds = self.launched.wait()
        best, z_best, z_draft = self.scored.numpy().T
        return Margins(margins_of(self.rows, best.astype(np.int64), z_best, z_draft), seconds)
