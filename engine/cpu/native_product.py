"""A product as kernels call it themselves."""

import ctypes


class NativeProduct(ctypes.Structure):
    """``NativeProduct`` of layer.c: a ``Multiply`` of operators.h, and its first argument, which is not kept alive."""

    _fields_ = [("multiply", ctypes.c_void_p), ("product", ctypes.c_void_p), ("num_out", ctypes.c_int64)]

    def __init__(self, function: "ctypes._FuncPointer", product: ctypes.Structure, num_out: int) -> None:
        super().__init__(ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(product), num_out)
