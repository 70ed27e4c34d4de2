"""Products with bfloat16 weights on any CPU, computed by ``bf16.c`` and ``tiles.c`` from prepacked weights."""

import ctypes

import torch
from torch import Tensor

from engine.cpu.native_product import NativeProduct
from engine.models.weights import LinearWeight

_PANEL, _PAIR = 32, 2  # as in bf16.h


class _Bf16Product(ctypes.Structure):
    _fields_ = [
        ("num_in", ctypes.c_int64),
        ("num_out", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class Bf16Linear:
    """``engine.ops.Linear``. A row's result is bit-identical whatever else is in the batch. docs/measurements/decode.md
    compares it with oneDNN in fp32 and bf16 at each CPU level."""

    def __init__(self, library: ctypes.CDLL, weight: LinearWeight) -> None:
        self._function = library.bf16_product
        self._function.argtypes = (ctypes.c_void_p,) * 3 + (ctypes.c_int64, ctypes.c_int)
        self._function.restype = ctypes.c_int
        dense = weight.dense
        self._num_out, self._num_in = dense.shape
        filled = torch.nn.functional.pad(dense, (0, 0, 0, -self._num_out % _PANEL))
        self._weights = filled.view(-1, _PANEL, self._num_in // _PAIR, _PAIR).transpose(1, 2).contiguous()
        padding = (0, -self._num_out % _PANEL)
        self._bias = None if weight.bias is None else torch.nn.functional.pad(weight.bias.float(), padding)
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self._product = _Bf16Product(self._num_in, self._num_out, self._weights.data_ptr(), bias_at)
        self._at = ctypes.byref(self._product)
        self.native = NativeProduct(library.bf16_product, self._product, self._num_out)

    @staticmethod
    def supports(weight: LinearWeight) -> bool:
        return weight.dense.dtype == torch.bfloat16 and weight.dense.shape[1] % _PAIR == 0

    def __call__(self, x: Tensor) -> Tensor:
        """bf16 [rows, in] -> bf16 [rows, out]"""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self._num_out, dtype=torch.bfloat16)
        if self._function(self._at, x.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads()):
            raise MemoryError(f"no memory for a product of {x.shape[0]} rows with {self._num_in} inputs")
        return out
