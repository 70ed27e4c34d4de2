"""Weights of a model, read from safetensors one tensor at a time. Files are memory-mapped, so peak memory is near the size
of the weights. Fused weights (q, k, v; gate, up) are one product in the pass."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import ModelUnavailable
from engine.models.config import DecoderConfig
from engine.models.int8 import COLUMNS, SCALE, Int8Matrix

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """``y = x W^T + b``: ``weight`` [out, in], ``bias`` [out]. ``uneven``: columns of x differ by orders of
    magnitude (``engine.models.int8``)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are fp32, as norms are computed in fp32."""

    input_norm: torch.Tensor  # [hidden]
    qkv: LinearWeight  # [q_size + 2 kv_size, hidden]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    out: LinearWeight  # [hidden, q_size]
    post_norm: torch.Tensor  # [hidden]
    gate_up: LinearWeight  # [2 intermediate, hidden], gate first
    down: LinearWeight  # [hidden, intermediate]


class Weights(Protocol):
    """A source of the weights of one model, read once, layer by layer."""

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]; in the file's own dtype where that is narrower, as rows are cast on lookup"""

    def layers(self) -> Iterator[LayerWeights]: ...

    def final_norm(self) -> torch.Tensor:
        """[hidden], fp32"""

    def head(self) -> torch.Tensor:
        """[vocab, hidden]; the same tensor as ``embedding()`` where tied and of one dtype"""


class TensorWeights:
    """Weights out of a mapping from Hugging Face names to tensors: an opened folder, or a state dict."""

    def __init__(self, config: DecoderConfig, source: "TensorSource", dtype: torch.dtype) -> None:
        self._config = config
        self._source = source
        self._dtype = dtype
        self._embedding: torch.Tensor | None = None

    def embedding(self) -> torch.Tensor:
        if self._embedding is None:
            table = self._source.read("model.embed_tokens.weight", (self._config.vocab_size, self._config.hidden_size))
            self._embedding = table if table.dtype.itemsize < self._dtype.itemsize else table.to(self._dtype)
        return self._embedding

    def layers(self) -> Iterator[LayerWeights]:
        for index in range(self._config.num_layers):
            yield self._layer(f"model.layers.{index}.")

    def final_norm(self) -> torch.Tensor:
        return self._norm("model.norm", self._config.hidden_size)

    def head(self) -> torch.Tensor:
        if self._config.tied_embeddings:
            return self.embedding().to(self._dtype)
        return self._read("lm_head.weight", (self._config.vocab_size, self._config.hidden_size))

    def _layer(self, prefix: str) -> LayerWeights:
        c = self._config
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = ((attention + "q_proj", c.q_size), (attention + "k_proj", c.kv_size), (attention + "v_proj", c.kv_size))
        gate_up = ((mlp + "gate_proj", c.intermediate_size), (mlp + "up_proj", c.intermediate_size))
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm", c.hidden_size),
            qkv=self._linear(qkv, c.hidden_size, c.qkv_bias),
            q_norm=self._norm(attention + "q_norm", c.head_dim) if c.qk_norm else None,
            k_norm=self._norm(attention + "k_norm", c.head_dim) if c.qk_norm else None,
            out=self._linear(((attention + "o_proj", c.hidden_size),), c.q_size, c.out_bias),
            post_norm=self._norm(prefix + "post_attention_layernorm", c.hidden_size),
            gate_up=self._linear(gate_up, c.hidden_size, c.mlp_bias),
            down=self._linear(((mlp + "down_proj", c.hidden_size),), c.intermediate_size, c.mlp_bias),
        )

    def _linear(self, parts: tuple[tuple[str, int], ...], num_in: int, has_bias: bool) -> LinearWeight:
        weights = [self._read(name + ".weight", (num_out, num_in)) for name, num_out in parts]
        biases = [self._read(name + ".bias", (num_out,)) for name, num_out in parts] if has_bias else []
        return LinearWeight(torch.cat(weights), torch.cat(biases) if biases else None)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._source.read(name + ".weight", (size,)).float()

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._source.read(name, shape).to(self._dtype)


class TensorSource(Protocol):
    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name. Raises ModelUnavailable: there is none, or it has another shape."""


class SafetensorsFolder:
    """The safetensors files of a model folder, single or sharded, mapped while this is open. Matrices stored as int8
    (``engine.models.int8``) are read as fp32."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._files = {name: self._open(name, stack) for name in sorted(set(self._shards().values()))}
        self._file_of = {key: file for file in self._files.values() for key in file.keys()}  # noqa: SIM118 - not a dict

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._get(name, shape)
        if tensor.dtype == torch.int8:
            return self._int8(name, tensor).dequantised()
        if not tensor.is_floating_point():
            raise ModelUnavailable(f"{self._folder}: tensor {name} holds {tensor.dtype}, which is not supported")
        return tensor

    def _get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelUnavailable(f"{self._folder}: no tensor {name} in its safetensors files")
        tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelUnavailable(f"{self._folder}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor

    def _int8(self, name: str, weight: torch.Tensor) -> Int8Matrix:
        if weight.dim() != 2:
            raise ModelUnavailable(f"{self._folder}: tensor {name} is int8, but no matrix")
        num_out, num_in = weight.shape
        scale = self._factors(name + SCALE, num_out)
        return Int8Matrix(weight, scale, self._factors(name + COLUMNS, num_in) if name + COLUMNS in self._file_of else None)

    def _factors(self, name: str, num: int) -> torch.Tensor:
        factors = self._get(name, (num,)).float()
        if not bool(((factors > 0) & factors.isfinite()).all()):
            raise ModelUnavailable(f"{self._folder}: tensor {name} holds scales that are no positive numbers")
        return factors

    def _shards(self) -> dict[str, str]:
        """Tensor name -> file; for a single file only its own name."""
        index = self._folder / INDEX
        if not index.exists():
            return {"": SINGLE}
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ModelUnavailable(f"{index} is not a safetensors index ({error!r}); it may be half-written") from error

    def _open(self, name: str, stack: ExitStack) -> safe_open:
        path = self._folder / name
        if not path.is_file():
            raise ModelUnavailable(f"{path} is missing: the folder holds no safetensors weights, or half of them")
        try:
            opened: safe_open = stack.enter_context(safe_open(path, framework="pt"))
            return opened
        except SafetensorError as error:
            raise ModelUnavailable(f"{path} is not a whole safetensors file ({error}); prepare the model again") from error


@contextmanager
def open_weights(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> Iterator[Weights]:
    """The weights in ``folder`` as ``dtype``, readable while the context is open. Raises ModelUnavailable: files are
    missing, broken, or do not fit ``config``; one line that says which."""
    with ExitStack() as stack:
        yield TensorWeights(config, SafetensorsFolder(folder, stack), dtype)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` with a path beside ``path``, and renames the result."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    partial.replace(path)
