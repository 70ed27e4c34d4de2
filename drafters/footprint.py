"""Upper bound of a drafter's memory, from its configuration and the headers of its files, for admission before loading.

Weights count in the dtype that they are held in (``engine.dtypes.held_dtype``): int8 with a scale per row, the head apart
from the embedding even if they are one in the file, and as shipped the bytes of their blocks. No torch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cluster.config import (
    MAX_LEARNED,
    CascadeOptions,
    Config,
    DrafterConfig,
    DrafterOptions,
    HiddenStateOptions,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
    VllmOptions,
    parts_of,
)
from cluster.errors import ModelUnavailable
from drafters.shipped import find_drafter, find_table
from engine.dtypes import AS_SHIPPED, choose_dtype, held_dtype
from engine.model_facts import ModelFacts, max_model_len, read_facts
from engine.models.config import load_config
from engine.models.manifest import shipped_tensors
from engine.models.prepare import resolve_model, shipped_file
from engine.partition import SHARES
from router.papers.faser_exit import DEPTHS, VOCABULARY_LEN

# Measured, resident: an actor's process alone, and what torch adds to it once it has computed. On CUDA
# a context with its kernels.
PROCESS_BYTES = 110 * 2**20
TORCH_BYTES = 350 * 2**20
VLLM_BYTES = 500 * 2**20  # of a target on vLLM's engine, beside torch
CUDA_BYTES = 600 * 2**20
# Bounds by arithmetic: elements of a row of a pass, times the hidden size; bytes of a logit in the sampling kernels, for an
# edited copy and a candidate; rows of a sequence that have logits.
ROW_ELEMENTS, CHOICE_BYTES, SAMPLED_ROWS = 32, 8, 17
# Measured, per token of a followed request: the list alone, an index of n-grams, an automaton.
TOKEN_BYTES, NGRAM_BYTES, AUTOMATON_BYTES = 36, 490, 450
# Measured, of a table: per learned context, per counted context, and its cache of look-ups.
LEARNED_BYTES, COUNTED_BYTES, LOOKUP_CACHE_BYTES = 570, 40, 6 * 2**20
VLLM_LORA_RANK = 16  # unless max_lora_rank is set
_EMBEDDING_PLACES = 3  # of tokens, which vLLM counts twice, and of logits
DTYPE_BYTES: dict[str, int] = {"int8": 1, "as-shipped": 4, "bfloat16": 2, "float16": 2, "float32": 4}  # of activations
_WHILE_LOADING = ("fp8", "int8_per", "mxfp8", "nvfp4_per")  # beginnings of vLLM's methods for weights in floating point
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # as safetensors names them
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes. ``stored``: of its files, read to load it; the others: in memory, once loaded with full caches."""

    stored_bytes: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    request_bytes: int = 0
    process_bytes: int = 0
    pass_bytes: int = 0  # of the largest pass, counted on GPUs

    @property
    def total(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.request_bytes + self.process_bytes + self.pass_bytes

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Footprint)))


def footprint(
    config: DrafterConfig,
    device: str,
    max_model_len: int,
    proposers: Sequence[DrafterConfig] = (),
    target: str = "auto",
    most_tokens: float = inf,
) -> Footprint:
    """Of one replica in its own process on ``device``, cpu or cuda, with its proposers. ``target`` is the served model, for
    drafters that share its rows; ``most_tokens``: of all requests that run at once. Raises ModelUnavailable."""
    on_gpu = device == "cuda"
    # In spare time it also follows up to four times as many requests that others draft for.
    num_tokens = int(min(5 * config.capacity * max_model_len, most_tokens))
    total = Footprint(process_bytes=CUDA_BYTES if on_gpu else PROCESS_BYTES + (TORCH_BYTES if config.has_model else 0))
    total = sum((_of(one.options, on_gpu, num_tokens, target) for one in (config, *proposers)), total)
    return replace(total, request_bytes=0) if on_gpu else total


def target_footprints(config: Config, facts: ModelFacts) -> tuple[Footprint, Footprint]:
    """Of the first rank of a target, the largest, and of the drafters in its process. With the cache count the hidden states
    that these read, a row per token. Raises ModelUnavailable."""
    target, on_gpu = config.target, config.target.device == "cuda"
    folder = resolve_model(config.model.name, target.engine)
    longest = max_model_len(config, facts)
    dtype = choose_dtype(target.dtype, "cuda" if on_gpu else "cpu", engine=target.engine)
    if target.engine == "vllm":
        whole = vllm_weights(folder, DTYPE_BYTES[dtype], str(target.vllm.get("quantization")))
    else:
        options = ModelOptions(model=config.model.name).model_copy(update={"dtype": dtype})
        whole = Footprint(*_weights(options, on_gpu, config.model.name))
    sampled_rows = min(target.longest_pass, target.max_num_sequences * SAMPLED_ROWS)
    row_bytes = ROW_ELEMENTS * facts.hidden_size * DTYPE_BYTES[dtype]
    choice_bytes = facts.vocab_size * (DTYPE_BYTES[dtype] + CHOICE_BYTES)
    num_tokens = target.kv_cache_bytes // facts.kv_bytes_per_token
    in_memory = PROCESS_BYTES + TORCH_BYTES + (VLLM_BYTES if target.engine == "vllm" else 0)
    own = Footprint(
        whole.stored_bytes,
        max(0, int(whole.weight_bytes * facts.weight_share - on_gpu * target.vllm.get("cpu_offload_gb", 0) * 2**30))
        + adapter_bytes(config, folder, DTYPE_BYTES[dtype])
        + exit_bytes(config, folder, dtype),
        target.kv_cache_bytes + hidden_state_bytes(config, facts) * num_tokens,
        0 if on_gpu else target.max_num_sequences * longest * TOKEN_BYTES,
        CUDA_BYTES if on_gpu else in_memory,
        target.longest_pass * row_bytes + sampled_rows * choice_bytes if on_gpu else 0,
    )
    colocated = (drafter for drafter in config.drafters if drafter.is_colocated)
    parts = (_of(one.options, on_gpu, one.capacity * longest, config.model.name) for one in colocated)
    drafters = sum(parts, Footprint())
    if on_gpu:
        drafters = replace(drafters, request_bytes=0, pass_bytes=round_bytes(config, folder))
    return own, drafters


def adapter_bytes(config: Config, folder: Path, element: int) -> int:
    """Of the places that vLLM keeps for LoRA adapters in every layer, without a share of ranks, and on a CPU of the adapters
    in them, which it holds apart. Counted in vLLM's layers of ten small models; of the embedding at most."""
    target = config.target
    if not target.num_adapters:
        return 0
    matrices = {name: shape for name, shape in _shapes(folder).items() if len(shape) == 2 and not name.endswith(_HEAD)}
    width = sum((_EMBEDDING_PLACES if name.endswith(_EMBEDDING) else 1) * sum(shape) for name, shape in matrices.items())
    rank = int(target.vllm.get("max_lora_rank", VLLM_LORA_RANK))
    return target.num_adapters * rank * width * element * (1 if target.device == "cuda" else 2)


def exit_bytes(config: Config, folder: Path, dtype: str) -> int:
    """Of early exit on the first rank: a copy of the head, unless it is the embedding there, the reduced head, a lens for
    each depth between layers, and the sums that it is fitted by, in fp32."""
    if config.target.early_exit == "off":
        return 0
    model, element = load_config(folder), max(2, DTYPE_BYTES[dtype])
    size, is_shared = model.hidden_size, model.tied_embeddings and config.target.tensor_parallel == 1
    head = 0 if is_shared and dtype != AS_SHIPPED else model.vocab_size * size * (2 if is_shared else element)
    fits = (len(DEPTHS) - 1) * (size * size * element + (2 * size + 1) * (size + 1) * 4)
    return head + VOCABULARY_LEN * size * element + fits


def round_bytes(config: Config, folder: Path) -> int:
    """Of the block tables of rounds that are recorded on a GPU (`drafters.hidden_states.device_round`): in each lane, of
    each size, one for every step of EAGLE-3 behind the first. ``folder``: of the target's model."""
    from drafters.hidden_states.config import EagleConfig
    from drafters.hidden_states.device_round import padded_steps
    from drafters.hidden_states.formats import num_layers_of, read_config
    from engine.cuda.graphs import PADDED_ROWS
    from engine.kv_cache import BLOCK_LEN

    num_blocks, target = 0, config.target
    num_lanes = 1 + (len(SHARES) if target.can_divide and target.partition != "off" else 0)
    for drafter in config.drafters:
        for part in parts_of(drafter.options) if drafter.is_colocated else ():
            if not isinstance(part, HiddenStateOptions):
                continue
            network = read_config(find_drafter(part.path), num_layers_of(folder))
            if isinstance(network, EagleConfig) and network.mask_token_id is None:
                most = drafter.max_draft_len
                steps = {padded_steps(k, network.draft_len, most) for k in range(1, most + 1)}
                num_tables = sum(PADDED_ROWS) * sum(k - 1 for k in steps)
                element = 4 if part.dtype == "float32" else 2
                held = int(part.kv_cache_gb * 2**30) // (BLOCK_LEN * network.shape.kv_bytes_per_token(element))
                num_blocks += num_lanes * num_tables * min(held, -(-network.shape.max_len // BLOCK_LEN))
    return 4 * num_blocks


def hidden_state_bytes(config: Config, facts: ModelFacts) -> int:
    """Of a token of the KV cache, for drafters that read them."""
    from drafters.registry import feature_layers

    on_gpu = config.target.device == "cuda"
    dtype = choose_dtype(config.target.dtype, "cuda" if on_gpu else "cpu", engine=config.target.engine)
    model = resolve_model(config.model.name, config.target.engine)
    layers = feature_layers([drafter for drafter in config.drafters if drafter.options.traits.reads_hidden_states], model)
    return len(layers) * facts.hidden_size * max(2, _element(dtype, on_gpu))


def target_footprint(config: Config) -> Footprint:
    """Of the first rank of a target with the drafters in its process. Raises ModelUnavailable."""
    facts = read_facts(config, resolve_model(config.model.name, config.target.engine))
    own, drafters = target_footprints(config, facts)
    return own + drafters


def vllm_weights(folder: Path, element: int, quantization: str = "") -> Footprint:
    """Floating-point weights in ``element`` bytes, quantised ones as they are stored, and those that vLLM quantises while it
    loads in one byte at most. Other formats than safetensors count as their files do."""
    loaded = 1 if quantization.startswith(_WHILE_LOADING) else element
    files = [file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")]  # the same again
    if not files:
        files = [file for kind in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for file in folder.glob(kind)]
    stored, held = sum(file.stat().st_size for file in files), 0
    for file in files:
        if file.suffix != ".safetensors":
            held += file.stat().st_size
            continue
        for name, kind, num_bytes in _stored_tensors(file):
            each = element if "embed" in name or "lm_head" in name else loaded
            held += num_bytes * each // _FLOAT_BYTES.get(kind, each)
    return Footprint(stored, held)


def _stored_tensors(path: Path) -> Iterator[tuple[str, str, int]]:
    """(name, dtype, bytes) of each tensor by the header of a safetensors file. Raises ModelUnavailable."""
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:  # the first checks the header
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(f"{path} is not a whole safetensors file ({error}); prepare the model again") from error
    for name, tensor in header.items():
        if name != "__metadata__":
            start, stop = tensor["data_offsets"]
            yield name, tensor["dtype"], stop - start


def _of(options: DrafterOptions, on_gpu: bool, num_tokens: int, target: str) -> Footprint:
    """Without the process. ``num_tokens``: of all requests that are followed."""
    match options:
        case NgramOptions():
            return Footprint(request_bytes=num_tokens * NGRAM_BYTES)
        case SuffixOptions():
            shared_bytes = options.max_shared_tokens * AUTOMATON_BYTES
            return Footprint(cache_bytes=shared_bytes, request_bytes=num_tokens * AUTOMATON_BYTES)
        case TableOptions():
            stored = 0 if options.path is None else _table_bytes(options.path)
            cache_bytes = MAX_LEARNED * LEARNED_BYTES + (LOOKUP_CACHE_BYTES if options.path is not None else 0)
            # Keys hardly shrink, so there are at most so many contexts.
            return Footprint(stored, stored // 8 * COUNTED_BYTES, cache_bytes, num_tokens * TOKEN_BYTES)
        case CascadeOptions():
            return sum((_of(member, on_gpu, num_tokens, target) for member in options.members), Footprint())
        case VllmOptions():  # its weights and cache are vLLM's, as the target's are
            return Footprint(request_bytes=num_tokens * TOKEN_BYTES)
        case ModelOptions() | LayersOptions() | HiddenStateOptions():
            cache_bytes = int(options.kv_cache_gb * 2**30)
            return Footprint(*_weights(options, on_gpu, target), cache_bytes, request_bytes=num_tokens * TOKEN_BYTES)


def _table_bytes(name_or_path: str) -> int:
    path = find_table(name_or_path)
    try:
        return path.stat().st_size
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read ({error.strerror})") from error


def _weights(options: ModelOptions | LayersOptions | HiddenStateOptions, on_gpu: bool, target: str) -> tuple[int, int]:
    """(bytes stored, bytes held)"""
    folder = resolve_model(options.model) if isinstance(options, ModelOptions) else find_drafter(options.path)
    shapes, element = _shapes(folder), _element(options.dtype, on_gpu, allows_int8=not isinstance(options, ModelOptions))
    shipped = {name: num_bytes for name, (_, num_bytes) in shipped_tensors(folder).items()}
    files = (shipped_file(folder),) if shipped else folder.glob("*.safetensors")
    if isinstance(options, ModelOptions):
        num_layers = load_config(folder).num_layers if options.num_layers is None else options.num_layers
        left_out = {name for name in shapes if name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers}
        shapes = {name: shape for name, shape in shapes.items() if name not in left_out}
        shapes.setdefault(_HEAD, shapes.get(_EMBEDDING, (0, 0)))
        shipped.setdefault(_HEAD, shipped.get(_EMBEDDING, element))
    elif isinstance(options, LayersOptions):
        config = load_config(folder)
        resolve_model(target if options.target == "auto" else options.target)
        (num_out,) = shapes.pop("draft_token_ids", (config.vocab_size,))
        shapes |= {_EMBEDDING: (config.vocab_size, config.hidden_size), _HEAD: (num_out, config.hidden_size)}
    held = 0
    for name, shape in shapes.items():
        if len(shape) != 2:
            held += 4 * prod(shape)  # norms in fp32
        elif held_dtype(options.dtype) == AS_SHIPPED:
            held += int(prod(shape) * shipped.get(name, element))
        elif name == _EMBEDDING:
            held += prod(shape) * max(element, 2)
        else:
            held += prod(shape) * element + (4 * shape[0] if element == 1 else 0)
    return sum(file.stat().st_size for file in files), held


def _element(dtype: str, on_gpu: bool, *, allows_int8: bool = False) -> int:
    """Bytes of a weight. int8 products exist on a CPU only; elsewhere such weights are bfloat16."""
    dtype = choose_dtype(dtype, "cuda" if on_gpu else "cpu", allows_int8=allows_int8)
    if on_gpu:
        return DTYPE_BYTES["float32" if dtype == "float32" else "bfloat16"]
    return DTYPE_BYTES[held_dtype(dtype)]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in the safetensors files of a folder, or of its GGUF file. Raises ModelUnavailable."""
    shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, (shape, _) in shipped_tensors(folder).items()}
    if shapes:
        return shapes
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError) as error:
            raise ModelUnavailable(f"{path} is not a whole safetensors file ({error}); prepare the model again") from error
    return shapes
