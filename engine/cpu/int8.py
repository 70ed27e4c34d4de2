"""Products with int8 weights on a CPU, computed by ``products.c`` from prepacked weights."""

import ctypes

import torch
from torch import Tensor

from engine.cpu.native_product import PANEL, NativeLinear, address, padded
from engine.models.int8 import quantise
from engine.models.weights import LinearWeight

_LANES, _QUAD = 16, 4  # as in products.c
_SIGNATURE = (ctypes.c_void_p,) * 5 + (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)


class _Int8Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_in", "num_out", "width")),
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "bias", "columns")),
    ]


class Int8Linear(NativeLinear):
    """``engine.ops.Linear`` and ``engine.ops.Logits`` of a matrix that is quantised here. Inputs are rounded to 16 bits of
    their row's scale, so nearly all error comes from the weights."""

    def __init__(self, library: ctypes.CDLL, weight: LinearWeight, dtype: torch.dtype) -> None:
        self._logits = library.int8_product
        self._logits.argtypes = _SIGNATURE
        self._logits.restype = ctypes.c_int
        matrix = quantise(weight.dense, uneven=weight.uneven)
        num_out, num_in = matrix.weight.shape
        self._weights = _packed(matrix.weight, by_bytes=bool(library.int8_by_bytes()))
        self._scales = padded(matrix.scale)
        self._bias = None if weight.bias is None else padded(weight.bias)
        self._columns = None if matrix.columns is None else matrix.columns.contiguous()
        at = self._weights.data_ptr(), self._scales.data_ptr(), address(self._bias), address(self._columns)
        product = _Int8Product(num_in, num_out, -(-num_in // _LANES) * _LANES, *at)
        super().__init__(library.int8_linear, product, dtype)

    def logits(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        """[rows, in] -> fp32 [rows, out], added to ``base``, fp32, possibly with strided rows."""
        out, num_rows = torch.empty(x.shape[0], self.native.num_out), x.shape[0]
        of_base = (None, 0) if base is None else (base.data_ptr(), base.stride(0))
        if self._logits(self._at, x.data_ptr(), None, out.data_ptr(), *of_base, num_rows, torch.get_num_threads()):
            raise MemoryError(f"no memory for logits of {num_rows} rows with {x.shape[1]} inputs")
        return out


def _packed(weight: Tensor, *, by_bytes: bool) -> Tensor:
    """int8 [out, in] -> uint8 or int8 [out / 32, in / 4, 32, 4], both filled up, as ``int8_by_bytes`` in products.c says."""
    num_out, num_in = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -num_in % _QUAD, 0, -num_out % PANEL))
    panels = filled.view(-1, PANEL, filled.shape[1] // _QUAD, _QUAD).transpose(1, 2)
    if by_bytes:
        return (panels.to(torch.int16) + 128).to(torch.uint8).contiguous()
    return panels[..., [0, 2, 1, 3]].contiguous()
