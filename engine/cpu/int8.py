"""Products with int8 weights on a CPU, computed by ``products.c`` from prepacked weights."""

import ctypes

import torch
from torch import Tensor

from engine.cpu.native_product import NativeProduct
from engine.models.int8 import quantise
from engine.models.weights import LinearWeight

_LANES, _PANEL, _QUAD = 16, 32, 4  # as in products.c
_SIGNATURE = (ctypes.c_void_p,) * 5 + (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)


class _Int8Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_in", "num_out", "width")),
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "bias", "columns")),
    ]


class Int8Linear:
    """``engine.ops.Linear`` and ``engine.ops.Logits`` of a matrix that is quantised here. Inputs are rounded to 16 bits of
    their row's scale, so nearly all error comes from the weights. A row's result depends on nothing else in the batch."""

    def __init__(self, library: ctypes.CDLL, weight: LinearWeight, dtype: torch.dtype) -> None:
        self._function = library.int8_product
        self._function.argtypes = _SIGNATURE
        self._function.restype = ctypes.c_int
        self._dtype = dtype
        matrix = quantise(weight.dense, uneven=weight.uneven)
        self._num_out, num_in = matrix.weight.shape
        self._num_in = num_in
        self._weights = _packed(matrix.weight, by_bytes=bool(library.int8_by_bytes()))
        self._scales = _padded(matrix.scale)
        self._bias = None if weight.bias is None else _padded(weight.bias.detach().float())
        self._columns = None if matrix.columns is None else matrix.columns.contiguous()
        self._product = _Int8Product(
            num_in,
            self._num_out,
            -(-num_in // _LANES) * _LANES,
            self._weights.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if self._columns is None else self._columns.data_ptr(),
        )
        self._at = ctypes.byref(self._product)
        self.native = NativeProduct(library.int8_linear, self._product, self._num_out)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] in the dtype."""
        out = torch.empty(x.shape[0], self._num_out, dtype=self._dtype)
        self._run(x, out.data_ptr(), None, None, 0)
        return out

    def logits(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        """[rows, in] -> fp32 [rows, out], added to ``base``, fp32, possibly with strided rows."""
        out = torch.empty(x.shape[0], self._num_out)
        if base is None:
            self._run(x, None, out.data_ptr(), None, 0)
        else:
            self._run(x, None, out.data_ptr(), base.data_ptr(), base.stride(0))
        return out

    def _run(self, x: Tensor, out: int | None, out_float: int | None, base: int | None, stride: int) -> None:
        num_rows, num_threads = x.shape[0], torch.get_num_threads()
        if self._function(self._at, x.data_ptr(), out, out_float, base, stride, num_rows, num_threads):
            raise MemoryError(f"no memory for a product of {num_rows} rows with {self._num_in} inputs")


def _packed(weight: Tensor, *, by_bytes: bool) -> Tensor:
    """int8 [out, in] -> uint8 or int8 [out / 32, in / 4, 32, 4], both filled up, as ``int8_by_bytes`` in products.c says."""
    num_out, num_in = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -num_in % _QUAD, 0, -num_out % _PANEL))
    panels = filled.view(-1, _PANEL, filled.shape[1] // _QUAD, _QUAD).transpose(1, 2)
    if by_bytes:
        return (panels.to(torch.int16) + 128).to(torch.uint8).contiguous()
    return panels[..., [0, 2, 1, 3]].contiguous()


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % _PANEL)).contiguous()
