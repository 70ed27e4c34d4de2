"""Every metric of ``/metrics`` in one table: its own name, and the name that vLLM's dashboards know it by."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.client import ClusterStatus, DrafterStatus, TargetStatus

# Upper bounds in seconds. Metrics appends api.request_deadline_s (600 s by default) where it exceeds the last of them.
_CALL = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
_COUNT = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)

Reading = Iterable[tuple[tuple[str, ...], float]]  # label values, and the value


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: without the suffix ``_total`` that a counter gets.
        text: what it says, as a sentence.
        read: takes it from the cluster's status; None: this process counts it.
        vllm: vLLM's names for it, and which of its labels each keeps beside ``model_name``; over the others it is summed up.
        mean: values are averaged where labels are dropped, not summed up.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[ClusterStatus], Reading] | None = None
    vllm: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mean: bool = False


def _targets(value: Callable[[TargetStatus], float]) -> Callable[[ClusterStatus], Reading]:
    return lambda status: [((target.name,), float(value(target))) for target in status.targets]


def _drafters(value: Callable[[DrafterStatus], float | None]) -> Callable[[ClusterStatus], Reading]:
    def read(status: ClusterStatus) -> Reading:
        values = [((drafter.name,), value(drafter)) for drafter in status.drafters]
        return [(labels, float(number)) for labels, number in values if number is not None]

    return read


def _memory(status: ClusterStatus) -> Reading:
    return [
        ((one.name, one.device), float(one.num_bytes))
        for one in status.drafters
        if one.device is not None and one.num_bytes is not None
    ]


def _kv_usage(target: TargetStatus) -> float:
    return 1 - target.num_free_blocks / target.num_blocks if target.num_blocks else 0.0


_TARGET, _DRAFTER = ("target",), ("drafter",)

_CALLS: Sequence[Metric] = (
    Metric("outrider_requests", "counter", "HTTP requests that were answered.", ("endpoint", "status")),
    Metric("outrider_requests_in_flight", "gauge", "Calls that are being served."),
    Metric("outrider_requests_queued", "gauge", "Calls that wait for their turn in this process."),
    Metric(
        "outrider_choices_finished",
        "counter",
        "Choices that ended, by reason; abort: the caller hung up, or the call's deadline passed.",
        ("finished_reason",),
        vllm={"vllm:request_success": ("finished_reason",)},
    ),
)
_TOKENS: Sequence[Metric] = (
    Metric("outrider_prompt_tokens", "counter", "Tokens of prompts.", vllm={"vllm:prompt_tokens": ()}),
    Metric("outrider_completion_tokens", "counter", "Tokens that were generated.", vllm={"vllm:generation_tokens": ()}),
    Metric(
        "outrider_prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        vllm={"vllm:prefix_cache_queries": (), "vllm:gpu_prefix_cache_queries": ()},
    ),
    Metric(
        "outrider_prefix_cache_hits",
        "counter",
        "Prompt tokens that were found in the prefix cache.",
        vllm={"vllm:prefix_cache_hits": (), "vllm:gpu_prefix_cache_hits": ()},
    ),
    Metric(
        "outrider_choice_prompt_tokens",
        "histogram",
        "Prompt tokens of a finished choice.",
        buckets=_COUNT,
        vllm={"vllm:request_prompt_tokens": ()},
    ),
    Metric(
        "outrider_choice_completion_tokens",
        "histogram",
        "Generated tokens of a finished choice.",
        buckets=_COUNT,
        vllm={"vllm:request_generation_tokens": ()},
    ),
    Metric(
        "outrider_choice_max_tokens",
        "histogram",
        "Tokens that a finished choice was allowed to have.",
        buckets=_COUNT,
        vllm={"vllm:request_params_max_tokens": (), "vllm:request_max_num_generation_tokens": ()},
    ),
)
_DRAFTING: Sequence[Metric] = (
    Metric("outrider_prediction_tokens_accepted", "counter", "Draft tokens that are part of answers.", _DRAFTER),
    Metric("outrider_prediction_tokens_rejected", "counter", "Draft tokens that were verified and rejected.", _DRAFTER),
    Metric(
        "outrider_drafts_verified",
        "counter",
        "Drafts that were verified: passes of the target times the requests that had draft tokens in them.",
        vllm={"vllm:spec_decode_num_drafts": ()},
    ),
    Metric(
        "outrider_draft_tokens_verified",
        "counter",
        "Draft tokens that were verified, by their position in the draft; the first has position 0.",
        ("position",),
        vllm={"vllm:spec_decode_num_draft_tokens": ()},
    ),
    Metric(
        "outrider_draft_tokens_accepted",
        "counter",
        "Draft tokens that were accepted, by their position in the draft; the first has position 0.",
        ("position",),
        vllm={"vllm:spec_decode_num_accepted_tokens": (), "vllm:spec_decode_num_accepted_tokens_per_pos": ("position",)},
    ),
)
_TIMES: Sequence[Metric] = (
    Metric("outrider_queue_seconds", "histogram", "Time that a call waited for its turn in this process.", buckets=_CALL),
    Metric(
        "outrider_ttft_seconds",
        "histogram",
        "Time from a call's arrival to the first token of a choice.",
        buckets=_CALL,
        vllm={"vllm:time_to_first_token_seconds": ()},
    ),
    Metric(
        "outrider_inter_token_seconds",
        "histogram",
        "Time between the passes of the target that brought tokens of a choice.",
        buckets=_TOKEN,
        vllm={"vllm:inter_token_latency_seconds": (), "vllm:time_per_output_token_seconds": ()},
    ),
    Metric(
        "outrider_tpot_seconds",
        "histogram",
        "Mean time per token of a choice after the first.",
        buckets=_TOKEN,
        vllm={"vllm:request_time_per_output_token_seconds": ()},
    ),
    Metric(
        "outrider_e2e_seconds",
        "histogram",
        "Time from a call's arrival to the last token of a choice that finished.",
        buckets=_CALL,
        vllm={"vllm:e2e_request_latency_seconds": ()},
    ),
    Metric(
        "outrider_choice_queue_seconds",
        "histogram",
        "Time from a call's arrival until a target began to compute the choice.",
        buckets=_CALL,
        vllm={"vllm:request_queue_time_seconds": ()},
    ),
    Metric(
        "outrider_prefill_seconds",
        "histogram",
        "Time from the beginning of a choice's first pass to its first token.",
        buckets=_CALL,
        vllm={"vllm:request_prefill_time_seconds": ()},
    ),
    Metric(
        "outrider_decode_seconds",
        "histogram",
        "Time from a choice's first token to its last.",
        buckets=_CALL,
        vllm={"vllm:request_decode_time_seconds": ()},
    ),
    Metric(
        "outrider_inference_seconds",
        "histogram",
        "Time from the beginning of a choice's first pass to its last token.",
        buckets=_CALL,
        vllm={"vllm:request_inference_time_seconds": ()},
    ),
)
_CLUSTER: Sequence[Metric] = (
    Metric(
        "outrider_routing_table_version",
        "gauge",
        "The version of the newest routing table.",
        read=lambda status: [((), float(status.table_version))],
    ),
    Metric(
        "outrider_target_ready",
        "gauge",
        "1 when the target takes requests, else 0.",
        _TARGET,
        read=_targets(lambda target: target.state == "ready"),
    ),
    Metric(
        "outrider_target_running",
        "gauge",
        "Requests in the target's batch.",
        _TARGET,
        read=_targets(lambda target: target.num_running),
        vllm={"vllm:num_requests_running": ()},
    ),
    Metric(
        "outrider_target_waiting",
        "gauge",
        "Requests that wait for room in the target's batch.",
        _TARGET,
        read=_targets(lambda target: target.num_waiting),
        vllm={"vllm:num_requests_waiting": ()},
    ),
    Metric(
        "outrider_target_preemptions",
        "counter",
        "Preemptions: a request's KV cache was freed for older requests and is computed again.",
        _TARGET,
        read=_targets(lambda target: target.num_preempted),
        vllm={"vllm:num_preemptions": ()},
    ),
    Metric(
        "outrider_target_blocks",
        "gauge",
        "Blocks of the target's KV cache.",
        _TARGET,
        read=_targets(lambda target: target.num_blocks),
    ),
    Metric(
        "outrider_target_free_blocks",
        "gauge",
        "Blocks of the KV cache that no request holds.",
        _TARGET,
        read=_targets(lambda target: target.num_free_blocks),
    ),
    Metric(
        "outrider_target_kv_usage_ratio",
        "gauge",
        "The share of the KV cache's blocks that requests hold, from 0 to 1.",
        _TARGET,
        read=_targets(_kv_usage),
        vllm={"vllm:kv_cache_usage_perc": (), "vllm:gpu_cache_usage_perc": ()},
        mean=True,
    ),
    Metric(
        "outrider_target_tokens_per_second",
        "gauge",
        "Tokens that the target committed in its last second of work.",
        _TARGET,
        read=_targets(lambda target: target.tokens_per_s),
    ),
    Metric(
        "outrider_target_step_seconds",
        "gauge",
        "The running mean of what a round of the target takes.",
        _TARGET,
        read=_targets(lambda target: target.step_ms / 1000),
    ),
)
_POOL: Sequence[Metric] = (
    Metric(
        "outrider_drafter_ready",
        "gauge",
        "1 when the drafter may draft, else 0.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.state == "ready"),
    ),
    Metric(
        "outrider_drafter_requests",
        "gauge",
        "Requests that the drafter drafts for.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.num_requests),
    ),
    Metric(
        "outrider_drafter_verified",
        "counter",
        "Draft tokens of the drafter that a target verified.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.num_proposed),
    ),
    Metric(
        "outrider_drafter_accepted",
        "counter",
        "Draft tokens of the drafter that a target accepted.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.num_accepted),
    ),
    Metric(
        "outrider_drafter_restarts",
        "counter",
        "Restarts of the drafter's process.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.num_restarts),
    ),
    Metric(
        "outrider_drafter_memory_bytes",
        "gauge",
        "Memory of its device that the drafter is counted with.",
        ("drafter", "device"),
        read=_memory,
    ),
    Metric(
        "outrider_drafter_loads",
        "counter",
        "How often the drafter was loaded into memory.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.num_loads),
    ),
    Metric(
        "outrider_drafter_evictions",
        "counter",
        "How often the drafter gave its memory to another one.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.num_evictions),
    ),
    Metric(
        "outrider_drafter_fallbacks",
        "counter",
        "How often the drafter was loaded on a CPU because its GPU had no room.",
        _DRAFTER,
        read=_drafters(lambda drafter: drafter.num_fallbacks),
    ),
    Metric(
        "outrider_drafter_reply_seconds",
        "gauge",
        "The running mean of the time in which the drafter replies.",
        _DRAFTER,
        read=_drafters(lambda drafter: None if drafter.reply_ms is None else drafter.reply_ms / 1000),
    ),
)

METRICS: Sequence[Metric] = (*_CALLS, *_TOKENS, *_DRAFTING, *_TIMES, *_CLUSTER, *_POOL)
