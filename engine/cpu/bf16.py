"""Products with bfloat16 weights on any CPU, computed by ``bf16.c`` and ``tiles.c`` from prepacked weights."""

import ctypes

import torch

from engine.cpu.native_product import PANEL, NativeLinear, address, padded
from engine.models.weights import LinearWeight

_PAIR = 2  # as in bf16.h


class _Bf16Product(ctypes.Structure):
    _fields_ = [
        ("num_in", ctypes.c_int64),
        ("num_out", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class Bf16Linear(NativeLinear):
    """With bf16 activations. docs/measurements/decode.md compares it with oneDNN in fp32 and bf16 at each CPU level."""

    def __init__(self, library: ctypes.CDLL, weight: LinearWeight) -> None:
        dense = weight.dense
        num_out, num_in = dense.shape
        filled = torch.nn.functional.pad(dense, (0, 0, 0, -num_out % PANEL))
        self._weights = filled.view(-1, PANEL, num_in // _PAIR, _PAIR).transpose(1, 2).contiguous()
        self._bias = None if weight.bias is None else padded(weight.bias)
        product = _Bf16Product(num_in, num_out, self._weights.data_ptr(), address(self._bias))
        super().__init__(library.bf16_product, product, torch.bfloat16)

    @staticmethod
    def supports(weight: LinearWeight) -> bool:
        return weight.dense.dtype == torch.bfloat16 and weight.dense.shape[1] % _PAIR == 0
