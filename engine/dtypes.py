"""The meaning of ``dtype: auto`` on this machine. No torch.

The choice is a rule (docs/measurements/decode.md) rather than a measurement, since all replicas and restarts must choose the
same for equal outputs. ``auto`` never quantises the target: it multiplies by weights that are shipped quantised as they are
where that is faster. Errors of drafters cost only speed.
"""

import logging
from functools import cache
from typing import Any

from cluster.config import CascadeOptions, Config, DrafterOptions, HiddenStateOptions, LayersOptions, ModelOptions
from cluster.errors import ModelUnavailable
from engine.compiling import kernels_fault
from engine.cpu_level import AVX2, cpu_level
from engine.models.manifest import shipped_tensors

logger = logging.getLogger(__name__)

AUTO, INT8, BFLOAT16, FLOAT32, AS_SHIPPED = "auto", "int8", "bfloat16", "float32", "as-shipped"
BFLOAT16_BYTES = 2  # of a weight


def choose_dtype(
    dtype: str, device: str, *, allows_int8: bool = False, engine: str = "native", is_final: bool = True
) -> str:
    """``dtype``, or for auto the fastest on ``device`` (cpu or cuda). Logs each choice once per process.

    Args:
        engine: of the target; vllm computes with torch's products, not with our kernels.
        is_final: False: logs nothing.
    """
    if dtype != AUTO:
        return BFLOAT16 if (dtype, device) == (AS_SHIPPED, "cuda") else dtype
    fault = kernels_fault() if engine != "vllm" else "vllm does not use them"
    if device == "cuda":
        chosen, reason = BFLOAT16, "it is on a GPU"
    elif fault is None:
        chosen = INT8 if allows_int8 else BFLOAT16
        reason = f"compiled kernels read half of the bytes of {BFLOAT16 if allows_int8 else FLOAT32}"
    elif cpu_level().has_bf16_products:
        chosen, reason = BFLOAT16, f"oneDNN multiplies in bfloat16 here, without our kernels: {fault}"
    else:
        chosen, reason = FLOAT32, f"products in bfloat16 are slow here, without our kernels: {fault}"
    if is_final:
        _log(chosen, reason, "trained drafters" if allows_int8 else "models")
    return chosen


@cache
def _log(dtype: str, reason: str, whose: str) -> None:
    logger.info("dtype auto of %s is %s: %s (CPU level %s)", whose, dtype, reason, cpu_level())


def held_dtype(dtype: str) -> str:
    """The dtype of weights in memory on a CPU, for a configured one. Without C kernels torch computes the products, none of
    them with int8 weights, and below AVX-512 BF16 those in bf16 ten times slower than in fp32."""
    if dtype == "float32":
        return dtype
    if kernels_fault() is None:
        return "bfloat16" if dtype == "auto" else dtype
    if dtype == AS_SHIPPED:
        return FLOAT32
    return "bfloat16" if cpu_level().has_bf16_products else "float32"


def resolve_dtypes(config: Config) -> Config:
    """A resolved configuration with the dtypes of target and drafters chosen. Idempotent. The launcher chooses for all
    nodes, so that replicas on CPUs of different levels compute in the same dtype."""
    target = config.target
    dtype = AS_SHIPPED if _is_faster_as_shipped(config) else choose_dtype(target.dtype, target.device, engine=target.engine)
    target, shared = target.model_copy(update={"dtype": dtype}), config.model.name if dtype == AS_SHIPPED else None
    drafters = tuple(
        one.model_copy(update={"options": _with_dtype(one.options, one.device, shared)}) if one.has_model else one
        for one in config.drafters
    )
    return config.model_copy(update={"target": target, "drafters": drafters})


def _is_faster_as_shipped(config: Config) -> bool:
    """Whether products by the quantised weights of its GGUF file beat those in bfloat16 at every number of rows: at AVX2
    (docs/measurements/README.md)."""
    from engine.models.prepare import resolve_model

    target = config.target
    is_plain = target.engine == "native" and target.tensor_parallel == 1 and target.early_exit == "off"
    if not is_plain or (target.dtype, target.device, cpu_level().name) != (AUTO, "cpu", AVX2) or kernels_fault() is not None:
        return False
    try:
        tensors = shipped_tensors(resolve_model(config.model.name))
    except ModelUnavailable:  # whoever loads it says why
        return False
    if all(num_bytes >= BFLOAT16_BYTES for _, num_bytes in tensors.values()):
        return False
    _log(AS_SHIPPED, "products by its quantised weights are the fastest", "models")
    return True


def _with_dtype(options: DrafterOptions, device: str, shared: str | None) -> DrafterOptions:
    """``shared``: the model whose weights the target maps as shipped, as drafters do that are it or layers of it."""
    update: dict[str, Any] = {}
    if isinstance(options, ModelOptions) and (options.model, options.dtype, device) == (shared, AUTO, "cpu"):
        update = {"dtype": AS_SHIPPED}
    elif isinstance(options, ModelOptions | LayersOptions | HiddenStateOptions):
        allows_int8 = not isinstance(options, ModelOptions)
        update = {"dtype": choose_dtype(options.dtype, device, allows_int8=allows_int8)}
    elif isinstance(options, CascadeOptions):
        update = {"members": tuple(_with_dtype(member, device, shared) for member in options.members)}
    return options.model_copy(update=update) if update else options
