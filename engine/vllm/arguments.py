"""The arguments of vLLM's engine that a configuration means. No vLLM."""

import ast
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import InvalidField

if TYPE_CHECKING:  # the command line reads flags without pydantic
    from cluster.config import TargetConfig

MAX_DRAFT_LEN = 16  # slots that vLLM reserves per request; longer drafts are cut
FEATURE_LAYERS, EOS_TOKEN_IDS = "outrider_feature_layers", "outrider_eos_token_ids"  # of vLLM's additional configuration

_LEAST_GPU_SHARE = 0.01
# Of passes that are captured: padding adds at most a quarter from 64 rows on, below which rows cost little. vLLM would add
# as many for batches in which each request has MAX_DRAFT_LEN drafts.
_GRAPH_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64))


def engine_arguments(
    folder: Path,
    target: "TargetConfig",
    max_model_len: int,
    feature_layers: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    proposer: Mapping[str, Any] = {},
    *,
    runner_v2: bool = False,
) -> dict[str, Any]:
    """Keywords of ``EngineArgs``, but for the executor of several ranks. ``target``: resolved. ``proposer``: vLLM's
    speculative configuration; without one, the speculative method is one that the model runner knows, and never asks."""
    on_cpu = target.device == "cpu"
    finds_size = target.kv_cache_gb == "auto" and not on_cpu  # of the cache: what vLLM's profile leaves
    none = {"method": "ngram"} if runner_v2 else {"method": "custom_class", "model": "engine.vllm.runner_v1.NoProposer"}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": target.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": target.max_num_sequences,
        "max_num_batched_tokens": max(target.longest_pass, target.max_num_sequences * (1 + MAX_DRAFT_LEN)),
        "block_size": target.block_len,  # vLLM takes others for some models
        "kv_cache_memory_bytes": None if finds_size else target.kv_cache_bytes,  # of a rank; a block of it holds padding
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "language_model_only": True,  # of models that also see or hear: calls are text alone
        "tensor_parallel_size": target.tensor_parallel,
        "enforce_eager": on_cpu,  # compiled, vLLM 0.32 answers wrongly in bfloat16 on a CPU
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_cls": f"engine.vllm.worker.{'Worker' if on_cpu else 'GpuWorker'}",
        "scheduler_cls": "engine.vllm.scheduler.PlannedScheduler",
        "speculative_config": {**(proposer or none), "num_speculative_tokens": MAX_DRAFT_LEN},
        "additional_config": {FEATURE_LAYERS: list(feature_layers), EOS_TOKEN_IDS: list(eos_token_ids)},
    }
    if not on_cpu:
        # vLLM refuses to start where less than this share of the GPU is free, also where the cache's size is given: drafters
        # may be on the same GPU.
        arguments["gpu_memory_utilization"] = target.gpu_memory_utilization if finds_size else _LEAST_GPU_SHARE
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_AND_PIECEWISE",  # `engine.vllm.graphs` prefers full ones for any lengths
            "cudagraph_capture_sizes": [rows for rows in _GRAPH_ROWS if rows <= arguments["max_num_batched_tokens"]],
        }
    lora = {"enable_lora": True, "max_loras": target.num_adapters} if target.num_adapters else {}
    return {**arguments, **target.vllm, **_compilation(arguments, target.vllm), **lora}


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
