"""Reads GGUF files in place: tensors are memory-mapped bytes of their blocks, which processes share."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import ModelUnavailable
from engine.models.quantised import BLOCKS, QuantisedMatrix

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # outputs first, as torch has it
    kind: int  # ggml's number of the type
    offset: int  # of the first byte, in the file
    num_bytes: int


class GgufFile:
    """One file, mapped as long as this or a tensor of it lives. Raises ModelUnavailable: it is none, or cut off."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError, ArithmeticError) as error:
            raise ModelUnavailable(f"{path} is not a whole GGUF file ({error!r})") from error
        self._bytes: NDArray[np.uint8] = reader.data
        self._fields = reader.fields
        self.tensors = {
            one.name: TensorInfo(
                tuple(map(int, reversed(one.shape))), int(one.tensor_type), int(one.data_offset), one.n_bytes
            )
            for one in reader.tensors
        }

    def value(self, key: str) -> Any:
        """Of the metadata; None: there is none."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def blocks(self, name: str) -> NDArray[np.uint8] | None:
        """The bytes of a quantised matrix, [outputs, bytes of a row]. None: it is not quantised. Raises KeyError."""
        info = self.tensors[name]
        if info.kind not in BLOCKS:
            return None
        return self._raw(info).reshape(info.shape[0], -1)

    def floats(self, name: str) -> torch.Tensor:
        """A tensor of floats, fp32. Raises KeyError, and ModelUnavailable: its type is not supported."""
        info = self.tensors[name]
        if info.kind not in _FLOATS:
            raise ModelUnavailable(f"{self.path}: tensor {name} has ggml's type {info.kind}, which is not supported")
        return torch.from_numpy(self._raw(info).copy()).view(_FLOATS[info.kind]).view(info.shape).float()

    def _raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        return np.asarray(self._bytes[info.offset : info.offset + info.num_bytes])


class GgufTensors:
    """``engine.models.weights.TensorSource`` over a GGUF file: quantised matrices stay as they lie there."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    @cached_property
    def _interleaved(self) -> Mapping[str, int]:
        """Heads of the projections whose rotary pairs llama.cpp puts side by side."""
        if self._file.value("general.architecture") != "llama":
            return {}
        heads = int(self._file.value("llama.attention.head_count"))
        return {"attn_q": heads, "attn_k": int(self._file.value("llama.attention.head_count_kv") or heads)}

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> "torch.Tensor | QuantisedMatrix":
        """As ``TensorSource.read``. Raises ModelUnavailable also for columns of a matrix."""
        own = _own_name(name)
        info = self._file.tensors.get(own)
        if info is None or info.shape != shape:
            found = "no such tensor" if info is None else f"the shape {info.shape}"
            raise ModelUnavailable(f"{self._file.path}: {name} ({own}) should have the shape {shape}; it has {found}")
        if columns is not None and len(columns) < shape[-1]:
            raise ModelUnavailable(f"{self._file.path}: quantised weights as shipped are not divided over ranks")
        order = self._order(own, shape[0])
        if rows is not None and len(rows) < shape[0]:
            order = np.arange(shape[0])[rows.start : rows.stop] if order is None else order[rows.start : rows.stop]
        blocks = self._file.blocks(own)
        if blocks is None:
            floats = self._file.floats(own)
            return floats if order is None else floats[torch.from_numpy(order)]
        return QuantisedMatrix(info.kind, blocks if order is None else blocks[order], shape[-1])

    def _order(self, name: str, num_rows: int) -> NDArray[np.int64] | None:
        """The file's rows in the order of Hugging Face's; None: they are."""
        heads = next((num for part, num in self._interleaved.items() if f".{part}." in name), None)
        if heads is None:
            return None
        return np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _own_name(name: str) -> str:
    """llama.cpp's name of a tensor, by Hugging Face's."""
    module, _, suffix = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{suffix}"
    _, _, index, part = module.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[part]}.{suffix}"
