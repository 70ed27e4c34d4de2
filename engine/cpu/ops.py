"""Operators on a CPU. Matrix products use prepacked weights, by the C kernels where they support the type, else by oneDNN;
everything else is in ``attention.c`` and ``kernels.c``."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch_layout import Layout
from engine.cpu.build import load_library
from engine.cpu.gumbel_argmax import CpuGumbelArgmax
from engine.cpu.native_product import Bf16Linear, Int8Linear, NativeProduct
from engine.cpu.packed import packed_linear
from engine.cpu.quantised import QuantisedLinear
from engine.models.config import DecoderConfig
from engine.models.quantised import QuantisedMatrix
from engine.models.weights import LinearWeight
from engine.ops import HeadNorms, LayerParts, Linear, Logits, plain_logits

_VECTOR_LEN = 16  # keys and head elements that the kernels take at once
_MAX_HEAD_DIM = 512
_CHUNK_LEN = 512  # keys, as in attention.c


class AttentionShape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_len")]


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


class CpuOps:
    """``engine.ops.Ops`` for bfloat16 or float32. Tensors must be contiguous. ``int8``: quantise weights. ``kv_dtype``: of
    the KV cache, by default the same. ``folder``: of the compiled kernels. Raises NoCompiler: the kernels cannot be built
    here; ValueError: not ``supports``."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        *,
        int8: bool = False,
        kv_dtype: torch.dtype | None = None,
        folder: Path | None = None,
    ) -> None:
        if not self.supports(config, dtype):
            raise ValueError(f"no kernels for a head dimension of {config.head_dim} in {dtype}")
        self._config = config
        self._dtype = dtype
        self._int8 = int8
        library = self._library = load_library(dtype, folder, kv_dtype)
        self._add_norm = _function(library.add_norm, "pppp ll f i")
        self._gate = _function(library.gate, "pp ll i")
        self._rotate_and_store = _function(library.rotate_and_store, "ppp f pppppp l p i")
        self._attention = _function(library.attention, "pppppp ll pp ii")
        self._attention.restype = ctypes.c_int
        _function(library.decoder_layer, "pppp l pppppp ll pppp i").restype = ctypes.c_int
        _function(library.layer_scratch, "plp").restype = ctypes.c_int64
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._shapes: dict[int, AttentionShape] = {}

    @staticmethod
    def supports(config: DecoderConfig, dtype: torch.dtype) -> bool:
        fits = config.head_dim % _VECTOR_LEN == 0 and config.head_dim <= _MAX_HEAD_DIM
        return fits and dtype in (torch.bfloat16, torch.float32)

    def linear(self, weight: LinearWeight) -> Linear:
        if isinstance(weight.weight, QuantisedMatrix):
            return QuantisedLinear(self._library, weight.weight, weight.bias, self._dtype)
        if self._int8:
            return Int8Linear(self._library, weight, self._dtype)
        if self._dtype == torch.bfloat16 and Bf16Linear.supports(weight):
            return Bf16Linear(self._library, weight)
        return packed_linear(weight)

    def logits(self, weight: LinearWeight) -> Logits:
        return Int8Linear(self._library, weight, self._dtype).logits if self._int8 else plain_logits(self.linear(weight))

    def gumbel_argmax(self, token_ids: NDArray[np.int64]) -> CpuGumbelArgmax:
        """The choice among logits of ``token_ids``, ascending."""
        return CpuGumbelArgmax(self._library, self._dtype, token_ids)

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        rows, size = residual.shape
        out = torch.empty(rows, size, dtype=self._dtype)
        self._add_norm(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            self._config.norm_eps,
            torch.get_num_threads(),
        )
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: HeadNorms | None, layout: Layout, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        c = self._config
        queries = torch.empty(qkv.shape[0], c.num_heads, c.head_dim)
        self._rotate_and_store(
            qkv.data_ptr(),
            None if norms is None else norms.q.data_ptr(),
            None if norms is None else norms.k.data_ptr(),
            c.norm_eps,
            layout.cos.data_ptr(),
            layout.sin.data_ptr(),
            layout.slots.data_ptr(),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            qkv.shape[0],
            self._shape(keys.shape[3]),
            torch.get_num_threads(),
        )
        return queries

    def attention(
        self, queries: torch.Tensor, layout: Layout, keys: torch.Tensor, values: torch.Tensor, *, products_only: bool = False
    ) -> torch.Tensor:
        """``products_only``: compute only the two products, the floor of its time, for benchmarks."""
        out = torch.empty(queries.shape[0], self._config.q_size, dtype=self._dtype)
        failed = self._attention(
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            layout.starts.data_ptr(),
            layout.base_lens.data_ptr(),
            layout.tables.data_ptr(),
            layout.tables.shape[1],
            layout.num_spans,
            out.data_ptr(),
            self._shape(keys.shape[3]),
            products_only,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {layout.num_rows} rows")
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=self._dtype)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def whole_layer(self, parts: LayerParts) -> CpuLayer | None:
        native = [p.native for p in parts.products if isinstance(p, Bf16Linear | Int8Linear | QuantisedLinear)]
        if len(native) < len(parts.products):
            return None
        return CpuLayer(self._library, parts, native, self._config.norm_eps, self._shape, self._scratch_of, self._dtype)

    def _scratch_of(self, size: int) -> int:
        """Address of ``size`` bytes, kept for the next pass: large ones that are freed fault in anew at each layer."""
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def _shape(self, block_len: int) -> "ctypes._CArgObject":
        shape = self._shapes.get(block_len)
        if shape is None:
            if block_len % _VECTOR_LEN or _CHUNK_LEN % block_len:
                raise ValueError(f"block_len must be a multiple of 16 that divides {_CHUNK_LEN} on a CPU, got {block_len}")
            c = self._config
            shape = self._shapes[block_len] = AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, block_len)
        return ctypes.byref(shape)


_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}


def _function(function: "ctypes._FuncPointer", signature: str) -> "ctypes._FuncPointer":
    function.argtypes = [_TYPES[letter] for letter in signature.replace(" ", "")]
    function.restype = None
    return function
