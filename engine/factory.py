"""Chooses operators by device. Vendors' packages are imported only here."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.compiling import NoCompiler
from engine.cpu.ops import CpuOps
from engine.cpu.packed import product_dtype
from engine.cpu_setup import configure_cpu
from engine.device import require
from engine.dtypes import choose_dtype
from engine.forward import CausalModel
from engine.kv_cache import BLOCK_LEN, num_blocks_for
from engine.models.config import DecoderConfig, load_config
from engine.models.weights import Weights, open_weights
from engine.native import NativeLimits, NativeTarget
from engine.ops import Ops, TorchOps

logger = logging.getLogger(__name__)

# dtype of activations and KV cache. int8 concerns weights; where no int8 products exist, they are bfloat16 too.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16}


def make_ops(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, *, int8: bool = False, block_len: int = BLOCK_LEN
) -> Ops:
    """The fastest operators available. Falls back to plain torch where kernels cannot be built, with a warning.

    Args:
        int8: quantise weights to int8, where such products exist (on a CPU).
        block_len: of the KV cache; on a GPU the kernels are compiled for it here.
    """
    if device.type == "cuda":
        return _cuda_ops(config, dtype, device, block_len)
    configure_cpu()  # entry points have done so; others that use this package may not have
    if device.type == "cpu" and CpuOps.supports(config, dtype):
        try:
            return CpuOps(config, dtype, int8=int8)
        except NoCompiler as error:
            logger.warning(
                "CPU kernels are not available, decoding will be several times slower: %s; weights are held in %s",
                error,
                str(product_dtype(dtype, device)).removeprefix("torch."),
            )
    return TorchOps(config, dtype)


def _cuda_ops(config: DecoderConfig, dtype: torch.dtype, device: torch.device, block_len: int) -> Ops:
    try:
        from engine.cuda.compile_check import KernelsUnavailable, try_out
        from engine.cuda.ops import CudaOps
    except ImportError as error:
        why = f"Triton cannot be imported ({error})"
    else:
        ops = CudaOps(config, dtype)
        try:
            try_out(ops, config, dtype, device, block_len)
            return ops
        except KernelsUnavailable as error:
            why = str(error)
    logger.warning("the GPU runs plain torch operators without CUDA graphs, which are several times slower: %s", why)
    return TorchOps(config, dtype)


def load_model(
    folder: Path, dtype: str = "auto", device: str = "cpu", num_layers: int | None = None, block_len: int = BLOCK_LEN
) -> CausalModel:
    """Loads the model of a Hugging Face folder; with ``num_layers`` only its first layers. Raises ModelUnavailable: missing,
    half-written or unsupported; one line that says which."""
    config = load_config(folder)
    if num_layers is not None:
        config = config.truncated(num_layers)
    dtype = choose_dtype(dtype, device)
    with open_weights(folder, config, DTYPES[dtype]) as weights:
        return build_model(config, weights, dtype, device, block_len)


def build_model(config: DecoderConfig, weights: Weights, dtype: str, device: str, block_len: int = BLOCK_LEN) -> CausalModel:
    """Builds a model from weights. Raises InvalidField: the device is a GPU, and there is none."""
    require(device)
    at, kind = torch.device(device), DTYPES[dtype]
    ops = make_ops(config, kind, at, int8=dtype == "int8", block_len=block_len)
    if at.type != "cuda" or isinstance(ops, TorchOps):  # plain torch reads lengths back, which no graph can capture
        return CausalModel(config, weights, ops, kind, at)
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
) -> NativeTarget:
    """A native target for the model of a Hugging Face folder. ``max_model_len`` is capped at the model's. Raises as
    ``load_model`` and ``NativeTarget``."""
    model = load_model(folder, dtype, device, block_len=block_len)
    limits = NativeLimits(
        num_blocks=num_blocks_for(model.config, kv_cache_bytes, model.dtype, block_len),
        block_len=block_len,
        max_num_sequences=max_num_sequences,
        max_pass_tokens=max_pass_tokens,
        max_model_len=min(max_model_len, model.config.max_len),
    )
    return NativeTarget(model, limits, feature_layers=feature_layers)
