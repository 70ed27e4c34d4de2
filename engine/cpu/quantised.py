"""Products with block-quantised weights on a CPU, computed by ``quantised.c`` from prepacked weights."""

import ctypes

import torch
from torch import Tensor

from engine.cpu.native_product import NativeProduct
from engine.models.quantised import Blocks, QuantisedMatrix

_PANEL = 32  # as in quantised.c
_PACKED = 2**24  # weights that are packed at once, which takes ten bytes of each


class _Quantised(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_in", "num_out", "block_len", "bits", "zero", "has_halves", "has_mins")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
    ]


class QuantisedLinear:
    """``engine.ops.Linear``. Inputs are rounded to 16 bits of their row's scale, weights are exact. A row's result is
    bit-identical whatever else is in the batch. Bytes of 4-bit blocks and of Q8_0 are those of the file."""

    def __init__(self, library: ctypes.CDLL, weight: QuantisedMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._function = library.quantised_product
        self._function.argtypes = (ctypes.c_void_p,) * 3 + (ctypes.c_int64, ctypes.c_int)
        self._function.restype = ctypes.c_int
        self._dtype = dtype
        self._num_out, self._num_in = weight.shape
        blocks = weight.blocks()
        halves = blocks.halves and bool(library.quantised_halves())
        factors, num = torch.float16 if halves else torch.float32, -(-_PACKED // self._num_in // _PANEL) * _PANEL
        self._weights = torch.cat([_packed(blocks.rows(i, i + num), factors) for i in range(0, self._num_out, num)])
        padding = (0, -self._num_out % _PANEL)
        self._bias = None if bias is None else torch.nn.functional.pad(bias.float(), padding).contiguous()
        self._product = _Quantised(
            self._num_in,
            self._num_out,
            blocks.q.shape[2],
            blocks.bits,
            blocks.zero,
            halves,
            blocks.minimum is not None,
            self._weights.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )
        self._at = ctypes.byref(self._product)
        self.native = NativeProduct(library.quantised_product, self._product, self._num_out)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] in the dtype."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self._num_out, dtype=self._dtype)
        if self._function(self._at, x.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads()):
            raise MemoryError(f"no memory for a product of {x.shape[0]} rows with {self._num_in} inputs")
        return out


def _packed(blocks: Blocks, factors: torch.dtype) -> Tensor:
    """uint8 [panels, blocks, bytes of a block of 32 outputs], as quantised.c says."""
    q = _in_panels(torch.from_numpy(blocks.q))  # [panels, 32, blocks, block length]
    if blocks.bits == 4:
        pairs = q.unflatten(-1, (-1, 4, 2)).int()
        shifts = torch.tensor([[4 * k, 16 + 4 * k] for k in range(4)], dtype=torch.int32)
        words = (pairs << shifts).sum((-2, -1), dtype=torch.int32)
    else:
        words = q.unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].contiguous().view(torch.int32).squeeze(-1)
    parts = [words.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8)]
    for factor in (blocks.scale, blocks.minimum):
        if factor is not None:
            parts.append(_in_panels(torch.from_numpy(factor)).transpose(1, 2).to(factors).contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def _in_panels(values: Tensor) -> Tensor:
    """[outputs, ...] -> [panels, 32, ...], filled up with zeros."""
    padding = (0, 0) * (values.dim() - 1) + (0, -len(values) % _PANEL)
    padded: Tensor = torch.nn.functional.pad(values, padding)
    return padded.view(-1, _PANEL, *values.shape[1:])
