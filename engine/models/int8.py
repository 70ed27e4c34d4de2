"""Matrices as int8 with a scale per row: a quarter of the bytes of fp32, and about 0.7% noise on their products.

    W[i, j] = weight[i, j] * scale[i] * columns[j]

``columns``, powers of two, are for matrices whose inputs differ by orders of magnitude, as raw hidden states do: the small
weights of large inputs would round to zero.

In safetensors these are ``name`` (int8), ``name_scale`` (fp32, [out]) and, if there are any, ``name_columns`` (fp32, [in]).
Quantising a dequantised matrix gives the same integers (through bf16, one in three hundred differs by one).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WeightsKind = Literal["int8", "bf16", "fp32"]
SCALE, COLUMNS = "_scale", "_columns"  # suffixes of the weight's name
_LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """``weight`` int8 [out, in], ``scale`` fp32 [out], ``columns`` fp32 [in] or None: ones."""

    weight: Tensor
    scale: Tensor
    columns: Tensor | None = None

    def dequantised(self) -> Tensor:
        """fp32 [out, in]"""
        rows = self.weight.float() * self.scale[:, None]
        return rows if self.columns is None else rows * self.columns


def quantise(weight: Tensor, *, uneven: bool = False) -> Int8Matrix:
    """The nearest int8 form of a matrix [out, in]. ``uneven``: the sizes of its inputs differ much, see above."""
    weight = weight.detach().float()
    columns = None
    if uneven:
        size = weight.square().mean(0).sqrt()
        typical = size.median()
        tiny = torch.finfo(torch.float32).tiny
        columns = torch.exp2(torch.log2(size.clamp_min(tiny) / typical.clamp_min(tiny)).clamp(-30, 30).round())
        weight = weight / columns
    scale = weight.abs().amax(1) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return Int8Matrix((weight / scale[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scale, columns)


def stored(tensors: Mapping[str, Tensor], kind: WeightsKind, is_uneven: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors as stored in a file, by name. Tensors of integers are unchanged, others than matrices are bfloat16.
    ``kind``: of matrices; fp32 applies to all tensors. ``is_uneven``: by the name of a matrix, as of ``quantise``."""
    written = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            written[name] = tensor.contiguous()
        elif kind == "int8" and tensor.dim() == 2 and min(tensor.shape) > 1:
            matrix = quantise(tensor, uneven=is_uneven(name))
            written |= {name: matrix.weight, name + SCALE: matrix.scale}
            if matrix.columns is not None:
                written[name + COLUMNS] = matrix.columns
        else:
            written[name] = tensor.to(torch.float32 if kind == "fp32" else torch.bfloat16).contiguous()
    return written
