"""``target.vllm``: arguments of vLLM's ``EngineArgs`` that it may not name, with the reason."""

from collections.abc import Mapping
from typing import Any

# argument: the field of ours that sets it
OURS = {
    "model": "model.name",
    "served_model_name": "model.served_names",
    "revision": "model.name: ORG/MODEL@REVISION",
    "max_model_len": "model.max_model_len",
    "generation_config": "model.generation_config",
    "dtype": "target.dtype",
    "tensor_parallel_size": "target.tensor_parallel",
    "block_size": "target.block_len",
    "kv_cache_memory_bytes": "target.kv_cache_gb",
    "gpu_memory_utilization": "target.gpu_memory_utilization",
    "max_num_seqs": "target.max_num_sequences",
    "max_num_batched_tokens": "target.max_pass_tokens",
    "data_parallel_size": "target.replicas",
    "speculative_config": "drafters",
    "spec_method": "drafters",
    "spec_model": "drafters",
    "spec_tokens": "drafters",
    "reasoning_parser": "api.reasoning_parser",
    "otlp_traces_endpoint": "observability.otlp_endpoint",
}
# argument: why it cannot be set
OWNED = {
    "scheduler_cls": "the round schedules",
    "scheduling_policy": "the round schedules",
    "worker_cls": "the worker samples by Outrider's rule",
    "distributed_executor_backend": "ranks are child processes of the target's",
    "async_scheduling": "the round waits for each pass",
    "additional_config": "it carries the layers that drafters read",
    "skip_tokenizer_init": "the API's processes hold the tokenizer",
    "disable_log_stats": "Outrider has statistics of its own",
    "use_tqdm_on_load": "the log of a target has no terminal",
    "max_num_scheduled_tokens": "the round plans each pass",
    "logits_processors": "the sampler is Outrider's",
    "override_generation_config": "the API has the sampling defaults",
    "pipeline_parallel_size": "one pass runs at a time, so stages would wait for each other",
    "runner": "only text generation is served",
    "convert": "only text generation is served",
}
_REFUSED = {**{name: f"set {field} instead" for name, field in OURS.items()}, **OWNED}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError: names an argument that the loop or another field sets."""
    for name in arguments:
        if name in _REFUSED:
            raise ValueError(f"{name} cannot be set here: {_REFUSED[name]}")
