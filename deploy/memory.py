"""Checks before the start whether a deployment fits into this machine's memory."""

from cluster.config import Config
from deploy.local_ray import LaunchError
from drafters.footprint import target_footprint
from engine.compiling import kernels_fault
from engine.dtypes import held_dtype
from profiler.hardware import available_memory_bytes

# Measured: Ray, Serve and the small processes, without weights and KV caches.
BASE_BYTES = int(1.3 * 2**30)
API_BYTES = int(0.13 * 2**30)  # of each replica of the API after the first


def check_memory(config: Config) -> None:
    """Checks targets on this machine's CPU; GPUs and other machines are unknown at this point.

    Raises LaunchError: too little free memory; ModelUnavailable: a drafter's files are missing or unsupported.
    """
    target = config.target
    if target.device == "cuda" or config.cluster.ray_address is not None:
        return
    num_ranks = target.most * target.tensor_parallel
    base = BASE_BYTES + (config.api.replicas - 1) * API_BYTES
    own = target_footprint(config)
    needed, free = base + num_ranks * own.total, available_memory_bytes()
    if needed <= free:
        return
    held = held_dtype(target.dtype)
    is_wider = held == "float32" and target.dtype != held
    wider = f" (weights are held in {held}, since kernels are not available: {kernels_fault()})" if is_wider else ""
    weights, caches = (num_ranks * num_bytes / 2**30 for num_bytes in (own.weight_bytes, own.cache_bytes))
    parts = f"weights {weights:.1f}, caches and hidden states {caches:.1f}, processes and lists of tokens the rest"
    raise LaunchError(
        f"{config.model.name} needs about {needed / 2**30:.1f} GB of memory ({parts}){wider}, {free / 2**30:.1f} GB are "
        f"free: end other programs or lower target.kv_cache_gb ({target.kv_cache_gb:g})"
    )
