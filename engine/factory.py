"""The one place that knows which operators run on which device. A vendor's package is imported here and nowhere else."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.compiling import NoCompiler
from engine.cpu.ops import CpuOps
from engine.cpu_setup import configure_cpu
from engine.dtypes import choose_dtype
from engine.forward import CausalModel
from engine.kv_cache import BLOCK_LEN, num_blocks_for
from engine.models.config import ModelConfig, load_config
from engine.models.weights import Weights, open_weights
from engine.native import NativeLimits, NativeTarget
from engine.ops import Ops, TorchOps

logger = logging.getLogger(__name__)

# Of activations and KV cache. int8 is of weights: where there are no such products they are bfloat16 too.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16}


def make_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> Ops:
    """The fastest operators that work here: what cannot be built is replaced by plain torch, and the log says so.

    Args:
        int8: products with weights shall read int8 forms of them, where there are such products: on a CPU.
    """
    if device.type == "cuda":
        from engine.cuda.ops import CudaOps

        return CudaOps(config, dtype)
    configure_cpu()  # entry points have done so; others that use this package may not have
    if device.type == "cpu" and CpuOps.supports(config, dtype):
        try:
            return CpuOps(config, dtype, int8=int8)
        except NoCompiler as error:
            logger.warning("CPU kernels are not available, decoding will be several times slower: %s", error)
    return TorchOps(config, dtype)


def load_model(folder: Path, dtype: str = "auto", device: str = "cpu", num_layers: int | None = None) -> CausalModel:
    """The model of a Hugging Face folder, ready to run; with ``num_layers`` only its first layers.

    Raises:
        ModelUnavailable: missing, half-written or unsupported; one line that says which.
    """
    config = load_config(folder)
    if num_layers is not None:
        config = config.truncated(num_layers)
    dtype = choose_dtype(dtype, device)
    with open_weights(folder, config, DTYPES[dtype]) as weights:
        return build_model(config, weights, dtype, device)


def build_model(config: ModelConfig, weights: Weights, dtype: str, device: str) -> CausalModel:
    """A model ready to run, of weights from anywhere."""
    at, kind = torch.device(device), DTYPES[dtype]
    return _model_class(at)(config, weights, make_ops(config, kind, at, int8=dtype == "int8"), kind, at)


def _model_class(device: torch.device) -> type[CausalModel]:
    if device.type != "cuda":
        return CausalModel
    from engine.cuda.graphs import GraphedModel

    return GraphedModel


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
    prefix_cache: bool = True,
    feature_layers: Sequence[int] = (),
) -> NativeTarget:
    """A native target for the model of a Hugging Face folder. A longer ``max_model_len`` than the model's is cut to it.

    Raises:
        ModelUnavailable: missing, half-written or unsupported; one line that says which.
        InvalidField: the KV cache cannot hold a sequence of ``max_model_len`` tokens; or there are no such layers.
    """
    model = load_model(folder, dtype, device)
    limits = NativeLimits(
        num_blocks=num_blocks_for(model.config, kv_cache_bytes, model.dtype, block_len),
        block_len=block_len,
        max_num_sequences=max_num_sequences,
        max_pass_tokens=max_pass_tokens,
        max_model_len=min(max_model_len, model.config.max_len),
    )
    return NativeTarget(model, limits, prefix_cache, feature_layers)
