"""Weights of a model, read from safetensors one tensor at a time.

Files are memory-mapped: pages are read when a tensor is fused and cast, and dropped with the mapping, so peak memory is near
the size of the weights. Fused weights (q, k, v; gate, up) are one product in the pass. A rank of a tensor parallel target
reads only the rows and columns of its shard.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import ModelUnavailable
from engine.models.config import DecoderConfig
from engine.models.gguf_file import GgufFile, GgufTensors
from engine.models.int8 import COLUMNS, SCALE, Int8Matrix
from engine.models.prepare import weights_file
from engine.models.quantised import QuantisedMatrix
from engine.tensor_parallel.sharding import Shard, shard_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """``y = x W^T + b``: ``weight`` [out, in], ``bias`` [out]. ``uneven``: columns of x differ by orders of
    magnitude (``engine.models.int8``)."""

    weight: torch.Tensor | QuantisedMatrix
    bias: torch.Tensor | None = None
    uneven: bool = False

    @property
    def dense(self) -> torch.Tensor:
        """``weight``, dequantised if it is quantised."""
        return _floats(self.weight)


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

    def embedding(self) -> torch.Tensor | QuantisedMatrix:
        """[vocab, hidden]; in the file's own dtype where that is narrower, as rows are cast on lookup"""

    def layers(self) -> Iterator[LayerWeights]: ...

    def final_norm(self) -> torch.Tensor:
        """[hidden], fp32"""

    def head(self) -> torch.Tensor | QuantisedMatrix:
        """[vocab, hidden]; the same tensor as ``embedding()`` where tied and of one dtype"""


class TensorWeights:
    """Weights out of a mapping from Hugging Face names to tensors, such as an opened folder. ``shard``: the part to read of
    a model of shape ``config``; None: all of it."""

    def __init__(
        self, config: DecoderConfig, source: "TensorSource", dtype: torch.dtype, shard: Shard | None = None
    ) -> None:
        self._config = config
        self._source = source
        self._dtype = dtype
        self._shard = shard or shard_of(config, 0, 1)
        self._embedding: torch.Tensor | QuantisedMatrix | None = None

    def embedding(self) -> torch.Tensor | QuantisedMatrix:
        if self._embedding is None:
            shape = self._config.vocab_size, self._config.hidden_size
            table = self._source.read("model.embed_tokens.weight", shape, self._shard.token_ids)
            if isinstance(table, QuantisedMatrix) or table.dtype.itemsize < self._dtype.itemsize:
                self._embedding = table
            else:
                self._embedding = table.to(self._dtype)
        return self._embedding

    def layers(self) -> Iterator[LayerWeights]:
        for index in range(self._config.num_layers):
            yield self._layer(f"model.layers.{index}.")

    def final_norm(self) -> torch.Tensor:
        return self._norm("model.norm", self._config.hidden_size)

    def head(self) -> torch.Tensor | QuantisedMatrix:
        if self._config.tied_embeddings:
            return _as(self.embedding(), self._dtype)
        shape = self._config.vocab_size, self._config.hidden_size
        return self._read("lm_head.weight", shape, self._shard.token_ids)

    def _layer(self, prefix: str) -> LayerWeights:
        c, s = self._config, self._shard
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q, kv = _of_heads(s.heads, c.head_dim), _of_heads(s.kv_heads, c.head_dim)
        qkv = (
            (attention + "q_proj", c.q_size, q),
            (attention + "k_proj", c.kv_size, kv),
            (attention + "v_proj", c.kv_size, kv),
        )
        gate_up = tuple((mlp + name, c.intermediate_size, s.columns) for name in ("gate_proj", "up_proj"))
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm", c.hidden_size),
            qkv=self._linear(qkv, c.hidden_size, c.qkv_bias),
            q_norm=self._norm(attention + "q_norm", c.head_dim) if c.qk_norm else None,
            k_norm=self._norm(attention + "k_norm", c.head_dim) if c.qk_norm else None,
            out=self._row_parallel(attention + "o_proj", c.q_size, q, c.out_bias),
            post_norm=self._norm(prefix + "post_attention_layernorm", c.hidden_size),
            gate_up=self._linear(gate_up, c.hidden_size, c.mlp_bias),
            down=self._row_parallel(mlp + "down_proj", c.intermediate_size, s.columns, c.mlp_bias),
        )

    def _linear(self, parts: tuple[tuple[str, int, range], ...], num_in: int, has_bias: bool) -> LinearWeight:
        """Of several matrices [num_out, num_in], one below the other, these rows."""
        weights = [self._read(name + ".weight", (num_out, num_in), rows) for name, num_out, rows in parts]
        biases = [self._floats(name + ".bias", (num_out,), rows) for name, num_out, rows in parts] if has_bias else []
        bias = torch.cat(biases).to(self._dtype) if biases else None
        quantised = [weight for weight in weights if isinstance(weight, QuantisedMatrix)]
        if len(quantised) == len(weights):
            return LinearWeight(QuantisedMatrix.joined(quantised), bias)
        return LinearWeight(torch.cat([_floats(weight).to(self._dtype) for weight in weights]), bias)

    def _row_parallel(self, name: str, num_in: int, columns: range, has_bias: bool) -> LinearWeight:
        """Of a matrix [hidden, num_in] these columns. The ranks' products are summed, so that one of them adds the bias."""
        weight = self._read(name + ".weight", (self._config.hidden_size, num_in), columns=columns)
        adds = has_bias and self._shard.is_first
        bias = self._floats(name + ".bias", (self._config.hidden_size,)).to(self._dtype) if adds else None
        return LinearWeight(weight, bias)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._floats(name + ".weight", (size,)).float()

    def _read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor | QuantisedMatrix:
        return _as(self._source.read(name, shape, rows, columns), self._dtype)

    def _floats(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> torch.Tensor:
        return _floats(self._source.read(name, shape, rows))


def _as(weight: torch.Tensor | QuantisedMatrix, dtype: torch.dtype) -> torch.Tensor | QuantisedMatrix:
    return weight if isinstance(weight, QuantisedMatrix) else weight.to(dtype)


def _floats(weight: torch.Tensor | QuantisedMatrix) -> torch.Tensor:
    return weight.dequantised() if isinstance(weight, QuantisedMatrix) else weight


class DenseWeights(TensorWeights):
    """Of a source without quantised matrices, or of those dequantised."""

    def embedding(self) -> torch.Tensor:
        return _floats(super().embedding())

    def head(self) -> torch.Tensor:
        return _floats(super().head())


def _of_heads(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


class TensorSource(Protocol):
    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor | QuantisedMatrix:
        """The tensor of that name, or these rows and columns of it: nothing else is read. ``shape``: of the whole.

        Raises ModelUnavailable: there is none, or it has another shape.
        """


class SafetensorsFolder:
    """The safetensors files of a model folder, single or sharded, mapped while this is open. Matrices stored as int8
    (``engine.models.int8``) are read as fp32."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._files = {name: self._open(name, stack) for name in sorted(set(self._shards().values()))}
        self._file_of = {key: file for file in self._files.values() for key in file.keys()}  # noqa: SIM118 - not a dict

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        tensor = self._get(name, shape, rows, columns)
        if tensor.dtype == torch.int8:
            return self._int8(name, tensor, shape, rows, columns).dequantised()
        if not tensor.is_floating_point():
            raise ModelUnavailable(f"{self._folder}: tensor {name} holds {tensor.dtype}, which is not supported")
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def integers(self, name: str) -> torch.Tensor:
        """Whole, as stored. Raises KeyError."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _get(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelUnavailable(f"{self._folder}: no tensor {name} in its safetensors files")
        stored = file.get_slice(name)
        if (found := tuple(stored.get_shape())) != shape:
            raise ModelUnavailable(f"{self._folder}: tensor {name} has shape {found}, expected {shape}")
        parts = zip_longest(shape, (rows, columns)[: len(shape)])
        wanted = [slice(0, num) if part is None else slice(part.start, part.stop) for num, part in parts]
        is_whole = all(of == slice(0, num) for num, of in zip(shape, wanted, strict=True))
        tensor: torch.Tensor = file.get_tensor(name) if is_whole else stored[tuple(wanted)]
        return tensor

    def _int8(
        self, name: str, weight: torch.Tensor, shape: tuple[int, ...], rows: range | None, columns: range | None
    ) -> Int8Matrix:
        if weight.dim() != 2:
            raise ModelUnavailable(f"{self._folder}: tensor {name} is int8, but no matrix")
        num_out, num_in = shape
        scale, has_columns = self._factors(name + SCALE, num_out, rows), name + COLUMNS in self._file_of
        return Int8Matrix(weight, scale, self._factors(name + COLUMNS, num_in, columns) if has_columns else None)

    def _factors(self, name: str, num: int, part: range | None) -> torch.Tensor:
        factors = self._get(name, (num,), part).float()
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
def open_weights(
    folder: Path, config: DecoderConfig, dtype: torch.dtype, shard: Shard | None = None
) -> Iterator[DenseWeights]:
    """The weights in ``folder``, or of the GGUF file that it was made from, as ``dtype``, or a shard of them, readable while
    the context is open. Raises ModelUnavailable: files are missing, broken, or do not fit ``config``; one line that says
    which."""
    with ExitStack() as stack:
        file = weights_file(folder)
        source = SafetensorsFolder(folder, stack) if file is None else GgufTensors(GgufFile(file), dtype)
        yield DenseWeights(config, source, dtype, shard)


def shipped_weights(file: Path, config: DecoderConfig, packed: Path | None = None) -> "TensorWeights":
    """The weights of a GGUF file: quantised ones as they are, others in fp32. ``packed``: as of ``GgufTensors``. Raises
    ModelUnavailable."""
    return TensorWeights(config, GgufTensors(GgufFile(file), packed=packed), torch.float32)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` with a path beside ``path``, and renames the result."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    partial.replace(path)
