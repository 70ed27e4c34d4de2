"""Products with bfloat16 (``bf16.c``, ``tiles.c``) and int8 weights (``products.c``) on a CPU, from prepacked weights, also
as kernels call them themselves."""

import ctypes

import torch
from torch import Tensor

from engine.models.int8 import quantise
from engine.models.weights import LinearWeight

PANEL = 32  # outputs that lie together, as in bf16.h, products.c and quantised.c


class NativeProduct(ctypes.Structure):
    """``NativeProduct`` of layer.c: a ``Multiply`` of operators.h, and its first argument, which is not kept alive."""

    _fields_ = [("multiply", ctypes.c_void_p), ("product", ctypes.c_void_p), ("num_out", ctypes.c_int64)]

    def __init__(self, function: "ctypes._FuncPointer", product: ctypes.Structure, num_out: int) -> None:
        super().__init__(ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(product), num_out)


class NativeLinear:
    """``engine.ops.Linear`` by a ``Multiply``. A row's result is bit-identical whatever else is in the batch. ``product``:
    its first argument, with ``num_in`` and ``num_out``, whose memory the subclass keeps. ``dtype``: of activations."""

    def __init__(self, function: "ctypes._FuncPointer", product: ctypes.Structure, dtype: torch.dtype) -> None:
        function.argtypes = (ctypes.c_void_p,) * 3 + (ctypes.c_int64, ctypes.c_int)
        function.restype = ctypes.c_int
        self._function, self._product, self._at, self._dtype = function, product, ctypes.byref(product), dtype
        self.native = NativeProduct(function, product, product.num_out)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] in the dtype."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.native.num_out, dtype=self._dtype)
        if self._function(self._at, x.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads()):
            raise MemoryError(f"no memory for a product of {x.shape[0]} rows with {self._product.num_in} inputs")
        return out


def padded(values: Tensor) -> Tensor:
    """fp32, filled up to whole panels."""
    return torch.nn.functional.pad(values.detach().float(), (0, -len(values) % PANEL)).contiguous()


def address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


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
