"""Products by torch's own libraries with prepacked weights, where there is no C kernel."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu_level import cpu_level
from engine.models.weights import LinearWeight

_PACKED_FOR_ROWS = 32  # oneDNN's layout for so many rows is as fast for one


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which torch multiplies values of ``dtype``. fp32 for bfloat16 on a CPU below AVX-512 BF16, where products
    in bfloat16 take about ten times as long."""
    is_slow = dtype == torch.bfloat16 and device.type == "cpu" and not cpu_level().has_bf16_products
    return torch.float32 if is_slow else dtype


def packed_linear(weight: LinearWeight) -> Callable[[Tensor], Tensor]:
    """The fastest product of few rows with ``weight`` on a CPU without C kernels: [rows, in] -> [rows, out].

    oneDNN with the weight in its own layout takes about 0.6 of the time of ``F.linear`` at 1 to 64 rows, and no more at 512.
    Weights are held, and multiplied, in their ``product_dtype``: below AVX-512, oneDNN does not lay out bfloat16.
    """
    dense = weight.dense
    kind, held = dense.dtype, product_dtype(dense.dtype, dense.device)
    if held != kind:
        wide = packed_linear(LinearWeight(dense.to(held), None if weight.bias is None else weight.bias.to(held)))
        return lambda x: wide(x.to(held)).to(kind)
    if not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, dense, weight.bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(dense, _PACKED_FOR_ROWS)
    bias = None if weight.bias is None else weight.bias.clone()
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")
