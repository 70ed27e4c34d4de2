"""Chooses operators by device. Vendors' packages are imported only here."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from cluster.errors import InvalidField
from engine.compiling import KernelsUnavailable, NoCompiler
from engine.cpu.build import load_library
from engine.cpu.gumbel_argmax import CpuGumbelArgmax
from engine.cpu.ops import CpuOps
from engine.cpu.packed import product_dtype
from engine.cpu_setup import configure_cpu
from engine.device import require
from engine.dtypes import AS_SHIPPED, choose_dtype
from engine.forward import CausalModel
from engine.kv_cache import BLOCK_LEN, num_blocks_for
from engine.models.config import DecoderConfig, load_config
from engine.models.prepare import packed_folder, shipped_file
from engine.models.weights import Weights, open_weights, shipped_weights
from engine.native import NativeLimits, NativeTarget
from engine.ops import Graphs, GumbelArgmax, Ops, TorchOps
from engine.tensor_parallel.ranks import ModelRanks, RankGroup
from engine.tensor_parallel.sharding import shard_of

logger = logging.getLogger(__name__)

# dtype of activations and, unless weights are as shipped, of the KV cache. int8 concerns weights; where no int8 products
# exist, they are bfloat16 too.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16, AS_SHIPPED: torch.float32}


def make_ops(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    int8: bool = False,
    block_len: int = BLOCK_LEN,
    kv_dtype: torch.dtype | None = None,
) -> Ops:
    """The fastest operators available. On a CPU falls back to plain torch where kernels cannot be built, with a warning.

    Args:
        int8: quantise weights to int8, where such products exist (on a CPU).
        block_len: of the KV cache; on a GPU the kernels are compiled for it here.
        kv_dtype: of the KV cache, by default ``dtype``.

    Raises InvalidField: the device is a GPU, for which Triton cannot compile the kernels.
    """
    if device.type == "cuda":
        with _triton():
            from engine.cuda.compile_check import try_out
            from engine.cuda.ops import CudaOps

            ops = CudaOps(config, dtype)
            try_out(ops, config, dtype, device, block_len)
            return ops
    configure_cpu()  # entry points have done so; others that use this package may not have
    if device.type == "cpu" and CpuOps.supports(config, dtype):
        try:
            return CpuOps(config, dtype, int8=int8, kv_dtype=kv_dtype)
        except NoCompiler as error:
            logger.warning(
                "CPU kernels are not available, decoding will be several times slower: %s; weights are held in %s",
                error,
                str(product_dtype(dtype, device)).removeprefix("torch."),
            )
    return TorchOps(config, dtype)


def make_gumbel_argmax(vocab_size: int, dtype: torch.dtype, device: torch.device) -> GumbelArgmax | None:
    """The choice among all tokens by a kernel for logits of ``dtype``. None: plain torch chooses, on a CPU. Raises as
    ``make_ops``."""
    if device.type == "cuda":
        with _triton():
            from engine.cuda.compile_check import try_sampling
            from engine.cuda.sampling import CudaGumbelArgmax

            kernel = CudaGumbelArgmax(np.arange(vocab_size))
            try_sampling(kernel, dtype, device)
            return kernel
    try:
        return CpuGumbelArgmax(load_library(dtype), dtype, np.arange(vocab_size))
    except NoCompiler as error:
        logger.warning("the target chooses tokens by plain torch, since CPU kernels are not available: %s", error)
        return None


def make_graphs(device: torch.device) -> Graphs | None:
    """None: on a CPU nothing is launched."""
    if device.type != "cuda":
        return None
    from engine.cuda.graphs import CudaGraphs

    return CudaGraphs(device)


@contextmanager
def _triton() -> Iterator[None]:
    """Without the kernels a GPU would be several times slower, and wait several times a pass."""
    try:
        yield
    except (ImportError, KernelsUnavailable) as error:
        why = f"Triton cannot be imported ({error})" if isinstance(error, ImportError) else str(error)
        raise InvalidField(
            "device", "cuda", f"needs a Triton that compiles its kernels here, or must be cpu: {why}"
        ) from error


def load_model(
    folder: Path,
    dtype: str = "auto",
    device: str = "cpu",
    num_layers: int | None = None,
    block_len: int = BLOCK_LEN,
    ranks: RankGroup | None = None,
) -> CausalModel:
    """Loads the model of a Hugging Face folder; with ``num_layers`` only its first layers, with ``ranks`` the shard of this
    rank. Raises ModelUnavailable: missing, half-written or unsupported; InvalidField: too many ranks; one line that says
    which. As shipped: on a CPU, without ranks."""
    config = load_config(folder)
    if num_layers is not None:
        config = config.truncated(num_layers)
    dtype = choose_dtype(dtype, device)
    of_rank = None if ranks is None else ModelRanks(ranks, shard_of(config, ranks.rank, ranks.num_ranks))
    if dtype == AS_SHIPPED:
        file = shipped_file(folder)
        return build_model(config, shipped_weights(file, config, packed_folder(folder, file)), dtype, device, block_len)
    with open_weights(folder, config, DTYPES[dtype], None if of_rank is None else of_rank.shard) as weights:
        return build_model(config, weights, dtype, device, block_len, of_rank)


def head_of(model: CausalModel, folder: Path) -> torch.Tensor:
    """The head of the whole model, [vocab, hidden]: its embedding where that is the head, else a copy, read again."""
    if model.config.tied_embeddings and model.ranks is None:
        return model.embedding
    with open_weights(folder, model.config, model.dtype) as weights:
        return weights.head().to(model.device, copy=True)


def build_model(
    config: DecoderConfig,
    weights: Weights,
    dtype: str,
    device: str,
    block_len: int = BLOCK_LEN,
    ranks: ModelRanks | None = None,
) -> CausalModel:
    """Builds a model from weights. Raises InvalidField: the device is a GPU, and there is none, or no Triton for it."""
    require(device)
    at, kind = torch.device(device), DTYPES[dtype]
    own = config if ranks is None else ranks.shard.config_of(config)
    kv_dtype = torch.bfloat16 if dtype == AS_SHIPPED else None
    ops = make_ops(own, kind, at, int8=dtype == "int8", block_len=block_len, kv_dtype=kv_dtype)
    if at.type != "cuda" or ranks is not None:  # graphs with collectives of several ranks are not tested
        return CausalModel(config, weights, ops, kind, at, ranks)
    from engine.cuda.graphs import GraphedModel

    return GraphedModel(config, weights, ops, kind, at)


def load_target(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    kv_cache_bytes: int = 2**29,
    block_len: int = BLOCK_LEN,
    max_num_sequences: int = 64,
    max_pass_tokens: int = 512,
    max_model_len: int = 2048,
    feature_layers: Sequence[int] = (),
    ranks: RankGroup | None = None,
    end_ranks: Callable[[], None] = lambda: None,
) -> NativeTarget:
    """A native target for the model of a Hugging Face folder. ``max_model_len`` is capped at the model's. Raises as
    ``load_model`` and ``NativeTarget``.

    Args:
        kv_cache_bytes: of one rank.
        ranks: the processes that compute it; rank 0 gets a ``LeadingTarget``, the others follow it (``Follower``).
        end_ranks: as of ``LeadingTarget``.
    """
    # Here, since a process that only drafts needs neither xgrammar nor protobuf.
    from engine.grammar.compiling import known_grammars
    from engine.tensor_parallel.rounds import LeadingTarget

    model = load_model(folder, dtype, device, block_len=block_len, ranks=ranks)
    # All ranks have as many blocks as fit the cache of the first one, which holds the most heads.
    largest = model.config if ranks is None else shard_of(model.config, 0, ranks.num_ranks).config_of(model.config)
    limits = NativeLimits(
        num_blocks=num_blocks_for(largest, kv_cache_bytes, model.kv_dtype, block_len),
        block_len=block_len,
        max_num_sequences=max_num_sequences,
        max_pass_tokens=max_pass_tokens,
        max_model_len=min(max_model_len, model.config.max_len),
    )
    grammars = known_grammars(folder, model.config.vocab_size, model.config.eos_token_ids)
    if ranks is not None and ranks.rank == 0:
        return LeadingTarget(model, limits, folder, ranks, feature_layers, end_ranks, grammars)
    return NativeTarget(model, limits, feature_layers=feature_layers, grammars=grammars if ranks is None else None)
