"""A product as kernels call it themselves."""

import ctypes

import torch
from torch import Tensor

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
