"""A decoder layer by one call of ``layer.c``."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch_layout import Layout
from engine.cpu.native_product import NativeProduct
from engine.ops import LayerParts


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, NativeProduct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("hidden", ctypes.c_int64),
        ("eps", ctypes.c_float),
    ]


class CpuLayer:
    """``engine.ops.WholeLayer``.

    Args:
        library: of ``decoder_layer``, with its types.
        products: of ``parts``, in the order of a pass.
        shape_of: the attention's shape, by the length of a block.
        scratch: memory of so many bytes, shared by all layers.
        dtype: of activations.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        parts: LayerParts,
        products: Sequence[NativeProduct],
        norm_eps: float,
        shape_of: "Callable[[int], ctypes._CArgObject]",
        scratch: Callable[[int], int],
        dtype: torch.dtype,
    ) -> None:
        self._parts = parts  # whose memory the structure points to
        self._shape_of = shape_of
        self._dtype = dtype
        self._scratch = scratch
        self._function, self._scratch_len = library.decoder_layer, library.layer_scratch
        norms = parts.input_norm.data_ptr(), parts.post_norm.data_ptr()
        heads = parts.head_norms
        of_heads = (None, None) if heads is None else (heads.q.data_ptr(), heads.k.data_ptr())
        self._layer = _DecoderLayer(*products, *norms, *of_heads, len(parts.input_norm), norm_eps)
        self._at = ctypes.byref(self._layer)

    def __call__(
        self, layout: Layout, residual: Tensor, delta: Tensor | None, kv: tuple[Tensor, Tensor], attends: Layout
    ) -> Tensor:
        keys, values = kv
        rows, shape = residual.shape[0], self._shape_of(keys.shape[3])
        out = torch.empty(residual.shape, dtype=self._dtype)
        failed = self._function(
            self._at,
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            out.data_ptr(),
            rows,
            layout.cos.data_ptr(),
            layout.sin.data_ptr(),
            layout.slots.data_ptr(),
            attends.starts.data_ptr(),
            attends.base_lens.data_ptr(),
            attends.tables.data_ptr(),
            attends.tables.shape[1],
            attends.num_spans,
            keys.data_ptr(),
            values.data_ptr(),
            shape,
            self._scratch(self._scratch_len(self._at, rows, shape)),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a layer of {rows} rows")
        return out
