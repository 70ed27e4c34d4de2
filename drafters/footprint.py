"""Memory of a drafter, predicted from its configuration and the headers of its files. No torch.

    total = process + weights in memory + KV cache + state of each request

Weights count as held for products: the head apart from the embedding even if they are one in the file, int8 with a scale per
row, and without a compiler in the dtype of ``engine.dtypes.held_dtype``. ``stored_bytes`` is read to load it.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cluster.config import (
    CascadeOptions,
    Config,
    DrafterConfig,
    DrafterOptions,
    DSparkOptions,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
)
from cluster.errors import ModelUnavailable
from engine.dtypes import choose_dtype, held_dtype
from engine.models.config import DecoderConfig, load_config

# Measured, resident: an actor's process alone, and what torch adds to it once it has computed. On CUDA
# a context with its kernels.
PROCESS_BYTES = 110 * 2**20
TORCH_BYTES = 350 * 2**20
CUDA_BYTES = 600 * 2**20
# Of a token of a request that is followed, measured: the list alone, an index of n-grams, an automaton.
TOKEN_BYTES, NGRAM_BYTES, AUTOMATON_BYTES = 36, 490, 450
LEARNED_BYTES = 570  # of a context that a table has learned
REMEMBERED_BYTES = 6 * 2**20  # of the contexts that a table has lately looked up
COUNTED_BYTES = 40  # of one that it was made with
DTYPE_BYTES: Mapping[str, int] = {"int8": 1, "bfloat16": 2, "float32": 4}
_STORED_BYTES = {"I8": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}
_BLOCK_LEN = 32  # as engine.kv_cache.BLOCK_LEN, which needs torch
_MAX_HEADER = 100 * 2**20
_TABLE = "table.npz"  # as drafters.table.FILE


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes. ``stored``: of its files; the others: in memory, once loaded with full caches."""

    stored_bytes: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    request_bytes: int = 0
    process_bytes: int = 0

    @property
    def total(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.request_bytes + self.process_bytes

    def plus(self, other: "Footprint") -> "Footprint":
        return Footprint(
            self.stored_bytes + other.stored_bytes,
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.request_bytes + other.request_bytes,
            self.process_bytes + other.process_bytes,
        )


def footprint(
    config: DrafterConfig, device: str, max_model_len: int, proposers: Sequence[DrafterConfig] = (), target: str = "auto"
) -> Footprint:
    """Of one replica in its own process, with its proposers.

    Args:
        device: cpu or cuda.
        max_model_len: of a request.
        target: the served model, for drafters that share its rows.

    Raises:
        ModelUnavailable: its files are missing, half-written or unsupported.
    """
    on_gpu = device == "cuda"
    # It follows as many requests of others again, and three times more, to keep in step with them.
    num_tokens = (5 if config.spare_share else 1) * config.capacity * max_model_len
    total = Footprint(process_bytes=CUDA_BYTES if on_gpu else PROCESS_BYTES + (TORCH_BYTES if config.has_model else 0))
    for one in (config, *proposers):
        found = _of(one.options, on_gpu, num_tokens, target)
        total = total.plus(Footprint(found.stored_bytes, found.weight_bytes, found.cache_bytes) if on_gpu else found)
    return total


def target_footprint(config: Config) -> Footprint:
    """Of one target replica on a CPU, with its colocated drafters and a row of hidden states per token of the KV cache.

    Raises:
        ModelUnavailable: the model or a drafter is missing, half-written or unsupported.
    """
    from drafters.feature_layers import feature_layers
    from engine.models.prepare import resolve_model

    target, max_model_len = config.target, config.model.max_model_len
    options = ModelOptions(model=config.model.name, dtype=target.dtype, kv_cache_gb=target.kv_cache_gb)
    own = DrafterConfig(name="target", options=options, capacity=target.max_num_sequences, spare_share=0)
    total = footprint(own, "cpu", max_model_len)
    companions = [drafter for drafter in config.drafters if drafter.is_companion]
    for drafter in companions:
        total = total.plus(_of(drafter.options, False, drafter.capacity * max_model_len, config.model.name))
    model, element = load_config(resolve_model(config.model.name)), max(2, _element(target.dtype, on_gpu=False))
    num_tokens = int(target.kv_cache_gb * 2**30) // model.kv_bytes_per_token(element)
    kept = len(feature_layers(companions)) * model.hidden_size * element * num_tokens
    return total.plus(Footprint(cache_bytes=kept))


def _of(options: DrafterOptions, on_gpu: bool, num_tokens: int, target: str) -> Footprint:
    match options:
        case NgramOptions():
            return Footprint(request_bytes=num_tokens * NGRAM_BYTES)
        case SuffixOptions():
            return Footprint(
                cache_bytes=options.max_shared_tokens * AUTOMATON_BYTES, request_bytes=num_tokens * AUTOMATON_BYTES
            )
        case TableOptions():
            return _table(options, num_tokens)
        case ModelOptions():
            return _model(options, on_gpu, num_tokens)
        case LayersOptions():
            return _layers(options, on_gpu, num_tokens, target)
        case DSparkOptions():
            return _dspark(options, on_gpu, num_tokens)
        case CascadeOptions():
            total = Footprint()
            for member in options.members:
                total = total.plus(_of(member, on_gpu, num_tokens, target))
            return total


def _table(options: TableOptions, num_tokens: int) -> Footprint:
    from drafters.shipped import find_drafter

    stored = num_counted = 0
    if options.path is not None:
        path = find_drafter(options.path)
        path = path / _TABLE if path.is_dir() else path
        try:
            stored = path.stat().st_size
        except OSError as error:
            raise ModelUnavailable(f"{path} cannot be read ({error.strerror})") from error
        num_counted = stored // 8  # keys hardly shrink: at the most so many contexts
    return Footprint(
        stored,
        weight_bytes=num_counted * COUNTED_BYTES,
        cache_bytes=options.max_learned * LEARNED_BYTES + (REMEMBERED_BYTES if options.path is not None else 0),
        request_bytes=num_tokens * TOKEN_BYTES,
    )


def _model(options: ModelOptions, on_gpu: bool, num_tokens: int) -> Footprint:
    from engine.models.prepare import resolve_model

    folder = resolve_model(options.model)
    config = load_config(folder)
    if options.num_layers is not None:
        config = config.truncated(options.num_layers)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    element = _element(options.dtype, on_gpu)
    embedding = config.vocab_size * config.hidden_size * min(element, _narrowest(folder))
    weights = embedding + _head(config, config.vocab_size, element) + _layer_weights(config, element)
    return Footprint(
        stored, weights, _cache(config, options.kv_cache_gb, element), 0 if on_gpu else num_tokens * TOKEN_BYTES
    )


def _layers(options: LayersOptions, on_gpu: bool, num_tokens: int, target: str) -> Footprint:
    from drafters.shipped import find_drafter
    from engine.models.prepare import resolve_model

    folder = find_drafter(options.path)
    config, shapes = load_config(folder), _shapes(folder)
    rows = resolve_model(target if options.target == "auto" else options.target)
    num_out = shapes["draft_token_ids"][1][0] if "draft_token_ids" in shapes else config.vocab_size
    element = _element(options.dtype, on_gpu, allows_int8=True)
    embedding = config.vocab_size * config.hidden_size * min(max(element, 2), _narrowest(rows))
    weights = embedding + _head(config, num_out, element) + _layer_weights(config, element)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Footprint(stored, weights, _cache(config, options.kv_cache_gb, max(element, 2)), num_tokens * TOKEN_BYTES)


def _dspark(options: DSparkOptions, on_gpu: bool, num_tokens: int) -> Footprint:
    """Its own tensors; embedding and head may be the target's."""
    from drafters.dspark.config import load_dspark_config
    from drafters.shipped import find_drafter

    folder = find_drafter(options.path)
    config, shapes = load_dspark_config(folder), _shapes(folder)
    element = _element(options.dtype, on_gpu, allows_int8=True)
    held = 0
    for dtype, shape in shapes.values():
        if len(shape) == 2:
            held += prod(shape) * element + 4 * shape[0]
        elif dtype != "I64":
            held += 4 * prod(shape)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Footprint(stored, held, _cache(config.shape, options.kv_cache_gb, max(element, 2)), num_tokens * TOKEN_BYTES)


def _element(dtype: str, on_gpu: bool, *, allows_int8: bool = False) -> int:
    """Bytes of a weight. int8 products exist on a CPU only; elsewhere such weights are bfloat16."""
    dtype = choose_dtype(dtype, "cuda" if on_gpu else "cpu", allows_int8=allows_int8)
    if on_gpu:
        return DTYPE_BYTES["float32" if dtype == "float32" else "bfloat16"]
    return DTYPE_BYTES[held_dtype(dtype)]


def _head(config: DecoderConfig, num_out: int, element: int) -> int:
    return num_out * (config.hidden_size * element + (4 if element == 1 else 0))


def _layer_weights(config: DecoderConfig, element: int) -> int:
    """Matrices, with row scales if int8; norms in fp32."""
    c = config
    matrices = (
        (c.q_size + 2 * c.kv_size, c.hidden_size),
        (c.hidden_size, c.q_size),
        (2 * c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    )
    scale = 4 if element == 1 else 0
    layer = sum(num_out * (num_in * element + scale) for num_out, num_in in matrices) + 2 * 4 * c.hidden_size
    return c.num_layers * layer + 4 * c.hidden_size


def _cache(config: DecoderConfig, kv_cache_gb: float, element: int) -> int:
    """Whole blocks. On a CPU a page is resident once written."""
    block = _BLOCK_LEN * config.kv_bytes_per_token(element)
    return int(kv_cache_gb * 2**30) // block * block


def _narrowest(folder: Path) -> int:
    """Bytes of an element of the embedding as stored."""
    for file in sorted(folder.glob("*.safetensors")):
        shapes = _header(file)
        if "model.embed_tokens.weight" in shapes:
            stored = _STORED_BYTES.get(shapes["model.embed_tokens.weight"][0], 4)
            return 4 if stored == 1 else stored  # int8 is read as fp32
    return 4


def _shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= _header(file)
    return found


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of a safetensors file.

    Raises:
        ModelUnavailable: not a safetensors file.
    """
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            raw: Any = json.loads(opened.read(size)) if size <= _MAX_HEADER else None
        return {name: (one["dtype"], tuple(one["shape"])) for name, one in raw.items() if name != "__metadata__"}
    except (OSError, struct.error, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelUnavailable(f"{file} is not a whole safetensors file ({error}); prepare the model again") from error
