"""Gumbel-argmax on a CPU, computed by ``gumbel_argmax.c`` for one output head."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from engine.noise import BLOCK_LEN

_SIGNATURE = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),  # head, logits, their stride, whether they are fp32
    *(ctypes.c_void_p,) * 6,  # keys, temperatures, floors; columns, maxima, margins
    *(ctypes.c_int64, ctypes.c_int),  # rows, threads
)


class _Head(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_columns", "num_blocks")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "blocks", "starts")),
    ]


class CpuGumbelArgmax:
    """``engine.ops.GumbelArgmax``, exact. ``library``: kernels for ``dtype``. ``token_ids``: of the columns
    of the logits, ascending."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, token_ids: NDArray[np.int64]) -> None:
        self._function = library.gumbel_argmax
        self._function.argtypes = _SIGNATURE
        self._function.restype = None
        self._dtypes = (dtype, torch.float32)
        self._token_ids = np.ascontiguousarray(token_ids, np.int64)
        self._blocks, starts = np.unique(self._token_ids // BLOCK_LEN, return_index=True)
        self._starts = np.append(starts, len(token_ids)).astype(np.int64)
        arrays = (array.ctypes.data for array in (self._token_ids, self._blocks, self._starts))
        self._head = _Head(len(token_ids), len(self._blocks), *arrays)
        self._at = ctypes.byref(self._head)

    def __call__(
        self,
        logits: torch.Tensor,
        keys: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        floors: NDArray[np.float32] | None = None,
        margins: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if logits.dtype not in self._dtypes or logits.stride(-1) != 1 or logits.shape[-1] != len(self._token_ids):
            raise ValueError(f"logits of {logits.dtype} {tuple(logits.shape)}, {len(self._token_ids)} columns are expected")
        num_rows = len(logits)
        keys, temperatures = np.ascontiguousarray(keys), np.ascontiguousarray(temperatures, np.float32)
        floors = None if floors is None else np.ascontiguousarray(floors, np.float32)
        columns, maxima = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
        self._function(
            self._at,
            logits.data_ptr(),
            logits.stride(0),
            logits.dtype == torch.float32,
            keys.ctypes.data,
            temperatures.ctypes.data,
            None if floors is None else floors.ctypes.data,
            columns.ctypes.data,
            maxima.ctypes.data,
            None if margins is None else margins.ctypes.data,
            num_rows,
            torch.get_num_threads(),
        )
        return self._token_ids[columns], maxima
