"""Reads GGUF files in place: tensors are memory-mapped bytes of their blocks, which processes share."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import ModelUnavailable
from engine.models.quantised import BLOCKS, QuantisedMatrix

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1 and later, by which rotary frequencies are divided
_AGAIN = "download or copy it again"
_DAMAGED = (struct.error, UnicodeDecodeError, OverflowError, MemoryError, ArithmeticError, TypeError, IndexError)  # header


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str  # llama.cpp's
    shape: tuple[int, ...]  # outputs first, as torch has it
    kind: int  # ggml's number of the type
    offset: int  # of the first byte, in the file
    num_bytes: int


class GgufFile:
    """One file, mapped as long as this or a tensor of it lives. ``metadata``: of texts in lists only their number;
    ``tensors``: by Hugging Face's names. Raises ModelUnavailable: it is none, of another kind, or not whole."""

    def __init__(self, path: Path) -> None:
        from transformers.integrations.gguf import reader

        self.path = path
        try:
            with path.open("rb") as file:
                magic, version = file.read(4), file.read(4)
            if magic != b"GGUF":
                raise ModelUnavailable(f"{path} is no GGUF file: it begins with {magic!r}")
            if version[:2] == b"\0\0":
                raise ModelUnavailable(f"{path} is big-endian; convert it with `gguf-convert-endian {path} little`")
            self._bytes = np.memmap(path, np.uint8, "r")
            self.metadata: Mapping[str, Any]
            self.metadata, num, at = reader._read_metadata(self._bytes, str(path))
            entries, at = reader._read_tensor_table(self._bytes, num, at)
            start = -(-at // (alignment := self.metadata.get("general.alignment", 32))) * alignment
            found = [
                TensorInfo(name, shape, kind, start + offset, self._num_bytes(name, shape, kind))
                for name, shape, kind, offset in entries
            ]
        except _DAMAGED as error:
            raise ModelUnavailable(f"{path} is cut off or damaged in its header; {_AGAIN}") from error
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"{path} cannot be read: {error}") from error
        if (num_parts := self.metadata.get("split.count", 1)) > 1:
            raise ModelUnavailable(f"{path} is one of {num_parts} parts; join them with `llama-gguf-split --merge`")
        if (end := max((info.offset + info.num_bytes for info in found), default=0)) > len(self._bytes):
            raise ModelUnavailable(f"{path} is cut off: it has {len(self._bytes):,} bytes of {end:,}; {_AGAIN}")
        self.tensors = {self._name(info.name): info for info in found}

    def blocks(self, name: str) -> NDArray[np.uint8] | None:
        """The bytes of a quantised matrix, [outputs, bytes of a row]. None: it is not quantised. Raises KeyError."""
        info = self.tensors[name]
        return self._raw(info).reshape(info.shape[0], -1) if info.kind in BLOCKS else None

    def floats(self, name: str) -> torch.Tensor:
        """A tensor of floats, fp32. Raises KeyError, and ModelUnavailable: its type is not supported."""
        info = self.tensors[name]
        if info.kind not in _FLOATS:
            raise ModelUnavailable(f"{self.path}: tensor {info.name} has ggml's type {info.kind}, which is not supported")
        return torch.from_numpy(self._raw(info).copy()).view(_FLOATS[info.kind]).view(info.shape).float()

    def _raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        return np.asarray(self._bytes[info.offset : info.offset + info.num_bytes])

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """Raises ModelUnavailable: of another type."""
        if kind in _FLOATS:
            return prod(shape) * _FLOATS[kind].itemsize
        if (of := BLOCKS.get(kind)) is None or shape[-1] % of.num_weights:
            raise ModelUnavailable(f"{self.path}: {name} has weights of ggml's type {kind}, which are not supported")
        return prod(shape) // of.num_weights * of.num_bytes

    def _name(self, own: str) -> str:
        """Hugging Face's name of a tensor, by llama.cpp's. Raises ModelUnavailable: one that would not be computed with."""
        if own == ROPE_FACTORS:
            return own
        match own.split("."):
            case [module, suffix] if module in _MODULES:
                return f"{_MODULES[module]}.{suffix}"
            case ["blk", index, module, suffix] if module in _LAYER_MODULES:
                return f"model.layers.{index}.{_LAYER_MODULES[module]}.{suffix}"
        raise ModelUnavailable(f"{self.path}: the tensor {own} is not supported")


class GgufTensors:
    """``engine.models.weights.TensorSource`` over a GGUF file. ``dtype``: that quantised matrices are restored to; None:
    they stay as they lie there. ``packed``: a folder for what products make of whole matrices; None: they keep it."""

    def __init__(self, file: GgufFile, dtype: torch.dtype | None = None, packed: Path | None = None) -> None:
        self._file = file
        self._dtype = dtype
        self._packed = packed

    @cached_property
    def _interleaved(self) -> Mapping[str, int]:
        """Heads of the projections whose rotary pairs llama.cpp puts side by side."""
        about = self._file.metadata
        if about.get("general.architecture") != "llama":
            return {}
        heads = int(about["llama.attention.head_count"])
        return {"q_proj": heads, "k_proj": int(about.get("llama.attention.head_count_kv") or heads)}

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> "torch.Tensor | QuantisedMatrix":
        """As ``TensorSource.read``. Columns of a quantised matrix need a ``dtype``."""
        info = self._file.tensors.get(name)
        if info is None or info.shape != shape:
            found = "no such tensor" if info is None else f"the shape {info.shape}"
            raise ModelUnavailable(f"{self._file.path}: {name} should have the shape {shape}; it has {found}")
        order = self._order(name, shape[0])
        if rows is not None and len(rows) < shape[0]:
            order = np.arange(shape[0])[rows.start : rows.stop] if order is None else order[rows.start : rows.stop]
        wanted = slice(None) if columns is None else slice(columns.start, columns.stop)
        blocks = self._file.blocks(name)
        if blocks is None:
            floats = self._file.floats(name)
            floats = floats if order is None else floats[torch.from_numpy(order)]
            return floats if columns is None else floats[..., wanted]
        packed = None if self._packed is None else self._packed / name
        matrix = QuantisedMatrix(info.kind, blocks if order is None else blocks[order], shape[-1], packed)
        return matrix if self._dtype is None else matrix.dequantised(self._dtype)[:, wanted]

    def _order(self, name: str, num_rows: int) -> NDArray[np.int64] | None:
        """The file's rows in the order of Hugging Face's; None: they are."""
        heads = next((num for part, num in self._interleaved.items() if f".{part}." in name), None)
        if heads is None:
            return None
        return np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
