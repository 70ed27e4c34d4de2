"""Whether a deployment fits into memory, known before its processes start, and how large the KV cache of a GPU is."""

import math

from cluster.config import Config
from cluster.resolve import Inventory, Node, resolve
from deploy.local_ray import LaunchError
from drafters.footprint import hidden_state_bytes, target_footprint, target_footprints
from engine.compiling import kernels_fault
from engine.dtypes import held_dtype
from engine.model_facts import ModelFacts, max_model_len
from engine.vllm.environment import torch_has_cuda
from profiler.hardware import available_memory_bytes, num_cores

# Measured: Ray, Serve and the small processes, without weights and KV caches.
BASE_BYTES = int(1.3 * 2**30)
API_BYTES = int(0.13 * 2**30)  # of each replica of the API after the first


def check_memory(config: Config) -> None:
    """Checks targets on this machine's CPU; the memory of GPUs and of other machines is unknown at this point.

    Raises LaunchError: too little free memory; ModelUnavailable: a drafter's files are missing or unsupported.
    """
    target, device = config.target, config.target.device
    if device == "auto" and torch_has_cuda():
        import torch

        device = resolve(config, Inventory((Node("", num_cores(), torch.cuda.device_count()),))).target.device
    if device == "cuda" or config.cluster.ray_address is not None:
        return
    num_ranks = target.most * target.tensor_parallel
    base = BASE_BYTES + (config.api.most - 1) * API_BYTES
    own = target_footprint(config)
    needed, free = base + num_ranks * own.total, available_memory_bytes()
    if needed <= free:
        return
    held = held_dtype(target.dtype)
    is_wider = held == "float32" and target.dtype != held
    wider = f" (weights are held in {held}, since kernels are not available: {kernels_fault()})" if is_wider else ""
    weights, caches = (num_ranks * num_bytes / 2**30 for num_bytes in (own.weight_bytes, own.cache_bytes))
    parts = (
        f"{_weights(config)} {weights:.1f}, caches and hidden states {caches:.1f}, processes and lists of tokens the rest"
    )
    raise LaunchError(
        f"{config.model.name} needs about {needed / 2**30:.1f} GB of memory ({parts}){wider}, {free / 2**30:.1f} GB are "
        f"free: end other programs or lower target.kv_cache_gb ({target.kv_cache_bytes / 2**30:g})"
    )


def sized(config: Config, facts: ModelFacts, gpu_bytes: int | None) -> Config:
    """A resolved configuration with ``max_model_len`` as a number, and on a GPU with the size of the KV cache. vLLM's own
    profile finds that within the result's ``gpu_memory_utilization``, a share of the whole GPU.

    Args:
        gpu_bytes: of a rank's GPU; None: unknown.

    Raises LaunchError: it does not fit, and what takes how much; ModelUnavailable as ``target_footprints``.
    """
    target = config.target
    if target.device != "cuda" or gpu_bytes is None:
        return config.changed(model={"max_model_len": max_model_len(config, facts)})
    is_auto, token_bytes = target.kv_cache_gb == "auto", facts.kv_bytes_per_token
    own, drafters = target_footprints(config, facts)
    allowed = int(gpu_bytes * min(1.0, target.resources.reserved[1]) * (target.gpu_memory_utilization if is_auto else 1.0))
    left = allowed - own.weight_bytes - own.pass_bytes - own.process_bytes - drafters.total
    hidden = hidden_state_bytes(config, facts)
    num_tokens = left // (token_bytes + hidden) if is_auto else target.kv_cache_bytes // token_bytes
    least = num_tokens
    if is_auto:
        # vLLM itself refuses a length that does not fit: it knows which layers keep a window alone.
        least = 1 if config.model.max_model_len == "auto" or target.engine == "vllm" else max_model_len(config, facts)
    if left < least * (token_bytes + hidden):
        parts = {
            _weights(config): own.weight_bytes,
            "the largest pass": own.pass_bytes,
            "CUDA": own.process_bytes,
            "drafters in the target's process": drafters.total,
            f"a KV cache of {least} tokens": least * token_bytes,
            "their hidden states": least * hidden,
        }
        takes = ", ".join(f"{name} {num_bytes / 2**30:.2f}" for name, num_bytes in parts.items() if num_bytes)
        raise LaunchError(
            f"{config.model.name} does not fit its GPU, of which it may take {allowed / 2**30:.2f} GB: {takes}; raise "
            "target.tensor_parallel or target.gpu_memory_utilization, or lower target.kv_cache_gb, target.max_pass_tokens "
            "or model.max_model_len"
        )
    config = config.changed(target={"kv_cache_gb": num_tokens * token_bytes / 2**30}) if is_auto else config
    config = config.changed(model={"max_model_len": max_model_len(config, facts)})
    if is_auto and target.engine == "vllm":
        not_counted = drafters.total + num_tokens * hidden  # by vLLM
        share = (allowed - not_counted) / gpu_bytes
        config = config.changed(target={"kv_cache_gb": "auto", "gpu_memory_utilization": share})
    return config


def cached_tokens(config: Config, facts: ModelFacts, gpu_bytes: int | None) -> float:
    """Upper bound of the tokens in the KV caches of all targets."""
    if config.target.device == "cuda" and gpu_bytes is None:
        return math.inf
    return config.target.most * max(gpu_bytes or 0, config.target.kv_cache_bytes) / facts.kv_bytes_per_token


def _weights(config: Config) -> str:
    return "weights and places of adapters" if config.target.num_adapters else "weights"
