"""The arguments of vLLM's engine that a configuration means. No vLLM."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.errors import InvalidField

MAX_DRAFT_LEN = 16  # slots that vLLM reserves per request; longer drafts are cut
FEATURE_LAYERS, EOS_TOKEN_IDS = "outrider_feature_layers", "outrider_eos_token_ids"  # of vLLM's additional configuration

_LEAST_GPU_SHARE = 0.01
# Of passes that are captured: padding adds at most a quarter from 64 rows on, below which rows cost little. vLLM would add
# as many for batches in which each request has MAX_DRAFT_LEN drafts.
_GRAPH_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64))


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """As of the section ``target`` of a configuration."""

    dtype: str  # bfloat16, float16 or float32
    max_model_len: int
    max_num_sequences: int
    max_pass_tokens: int
    block_len: int  # vLLM takes others for some models
    kv_cache_bytes: int | None  # of one rank; one block of it holds padding; None: what vLLM's profile leaves of gpu_share
    tensor_parallel: int = 1
    device: str = "cpu"
    num_threads: int = 1  # of one of several ranks on CPUs
    binds: bool = True  # several ranks on CPUs to cores of their own, where there are enough
    prefix_cache: bool = True
    num_adapters: int = 0  # LoRA adapters at once; 0: the layers take none
    gpu_share: float = 0.9  # of the GPU, for everything of a rank
    proposer: Mapping[str, Any] = field(default_factory=dict)  # vLLM's speculative configuration; {}: none
    more: Mapping[str, Any] = field(default_factory=dict)  # ``target.vllm``


def engine_arguments(
    folder: Path,
    limits: VllmLimits,
    feature_layers: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    *,
    runner_v2: bool = False,
) -> dict[str, Any]:
    """Keywords of ``EngineArgs``, but for the executor of several ranks. Without a proposer, the speculative method is one
    that the model runner knows, and never asks."""
    on_cpu = limits.device == "cpu"
    none = {"method": "ngram"} if runner_v2 else {"method": "custom_class", "model": "engine.vllm.runner_v1.NoProposer"}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": limits.dtype,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_sequences,
        "max_num_batched_tokens": max(limits.max_pass_tokens, limits.max_num_sequences * (1 + MAX_DRAFT_LEN)),
        "block_size": limits.block_len,
        "kv_cache_memory_bytes": limits.kv_cache_bytes,
        "enable_prefix_caching": limits.prefix_cache,
        "skip_tokenizer_init": True,
        "language_model_only": True,  # of models that also see or hear: calls are text alone
        "tensor_parallel_size": limits.tensor_parallel,
        "enforce_eager": on_cpu,  # compiled, vLLM 0.32 answers wrongly in bfloat16 on a CPU
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_cls": f"engine.vllm.worker.{'Worker' if on_cpu else 'GpuWorker'}",
        "scheduler_cls": "engine.vllm.scheduler.PlannedScheduler",
        "speculative_config": {**(limits.proposer or none), "num_speculative_tokens": MAX_DRAFT_LEN},
        "additional_config": {FEATURE_LAYERS: list(feature_layers), EOS_TOKEN_IDS: list(eos_token_ids)},
    }
    if not on_cpu:
        # vLLM refuses to start where less than this share of the GPU is free, also where the cache's size is given: drafters
        # may be on the same GPU.
        arguments["gpu_memory_utilization"] = limits.gpu_share if limits.kv_cache_bytes is None else _LEAST_GPU_SHARE
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_AND_PIECEWISE",  # `engine.vllm.graphs` prefers full ones for any lengths
            "cudagraph_capture_sizes": [rows for rows in _GRAPH_ROWS if rows <= arguments["max_num_batched_tokens"]],
        }
    lora = {"enable_lora": True, "max_loras": limits.num_adapters} if limits.num_adapters else {}
    return {**arguments, **limits.more, **_compilation(arguments, limits.more), **lora}


def _compilation(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for and, of the rest, our own."""
    ours, asked = own.get("compilation_config"), more.get("compilation_config")
    if ours is None or not isinstance(asked, Mapping):
        return {}
    if "max_cudagraph_capture_size" in asked:  # vLLM chooses the sizes up to it
        ours = {"cudagraph_mode": ours["cudagraph_mode"]}
    return {"compilation_config": {**ours, **asked}}


def check_names(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidField: the installed vLLM has no such argument; names the nearest one. Without vLLM nothing is known."""
    known = argument_switches()
    for name, value in arguments.items():
        if known and name not in known:
            nearest = get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise InvalidField(f"target.vllm.{name}", value, f"vLLM's EngineArgs has no such argument{hint}")


@cache
def argument_switches() -> Mapping[str, bool]:
    """Fields of ``EngineArgs`` in the installed vLLM, read from its source, and whether each is a switch. Empty
    without vLLM."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return {}
    source = Path(package.origin).with_name("engine").joinpath("arg_utils.py").read_text(encoding="utf-8")
    (arguments,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    types = {
        node.target.id: ast.unparse(node.annotation)
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name: kind in ("bool", "bool | None") for name, kind in types.items() if not name.startswith("_")}
