"""The choice of one token per row on a CPU: what ``race.c`` computes for one head."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from engine.noise import BLOCK_LEN

_SIGNATURE = (ctypes.c_void_p,) * 5 + (ctypes.c_int64, ctypes.c_int)


class _Head(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_columns", "num_blocks")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "blocks", "starts")),
    ]


class CpuRace:
    """argmax_v(logits_v / T + G(key, v)) of rows, exactly (DESIGN idea 1).

    Args:
        token_ids: that the columns of the logits are for, ascending.
    """

    def __init__(self, library: ctypes.CDLL, token_ids: NDArray[np.int64]) -> None:
        self._function = library.race
        self._function.argtypes = _SIGNATURE
        self._function.restype = None
        self._token_ids = np.ascontiguousarray(token_ids, np.int64)
        self._blocks, starts = np.unique(self._token_ids // BLOCK_LEN, return_index=True)
        self._starts = np.append(starts, len(token_ids)).astype(np.int64)
        arrays = (array.ctypes.data for array in (self._token_ids, self._blocks, self._starts))
        self._head = _Head(len(token_ids), len(self._blocks), *arrays)
        self._at = ctypes.byref(self._head)

    def __call__(self, logits: torch.Tensor, keys: NDArray[np.int64], temperatures: NDArray[np.float32]) -> list[int]:
        """The token of each row.

        Args:
            logits: fp32 [rows, len(token_ids)], contiguous.
            keys: of the noise, [rows]; ``engine.noise.noise_keys``.
            temperatures: [rows]; 0 takes the most probable token.
        """
        keys, temperatures = np.ascontiguousarray(keys), np.ascontiguousarray(temperatures, np.float32)
        columns = np.empty(len(logits), np.int64)
        self._function(
            self._at,
            logits.data_ptr(),
            keys.ctypes.data,
            temperatures.ctypes.data,
            columns.ctypes.data,
            len(logits),
            torch.get_num_threads(),
        )
        chosen: list[int] = self._token_ids[columns].tolist()
        return chosen
