"""The metrics of ``/metrics`` in one table, with the names that vLLM's dashboards use for them."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from cluster.client import ClusterStatus, DrafterStatus, TargetStatus
from cluster.counts import HistogramCounts, SloCounts

# Upper bounds in seconds. Metrics appends api.request_deadline_s (600 s by default) where it exceeds the last of them.
CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
# Draft lengths; 0 is a bucket of its own, and the last is cluster.types.MAX_DRAFT_LEN.
_LENS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)

Kind = Literal["counter", "gauge", "histogram"]
Value = float | HistogramCounts
Readings = Iterable[tuple[tuple[str, ...], Value]]  # label values, and the value
ByLabels = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: without the prefix ``outrider_``, and without the suffix ``_total`` of counters.
        text: its description, a sentence.
        read: reads it from the cluster's status; None: this process counts it.
        vllm: vLLM's names for it, without the prefix ``vllm:``, each with the labels that it keeps beside ``model_name``.
            Other labels are aggregated.
        mean: aggregate by the mean, else by the sum.
        own: read from a part of the status that is of this process.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[ClusterStatus], Readings] | None = None
    vllm: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mean: bool = False
    own: bool = False


def _counter(name: str, text: str, *vllm: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", text, labels, vllm=dict.fromkeys(vllm, ()))


def _histogram(
    name: str, text: str, *vllm: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = CALL_S
) -> Metric:
    return Metric(name, "histogram", text, labels, buckets, vllm=dict.fromkeys(vllm, ()))


def _whole(name: str, kind: Kind, text: str, value: Callable[[ClusterStatus], Value | None], *, own: bool = False) -> Metric:
    """Of the cluster."""

    def read(status: ClusterStatus) -> Readings:
        found = value(status)
        return [] if found is None else [((), found)]

    return Metric(name, kind, text, read=read, own=own)


def _each(
    role: str,
    name: str,
    kind: Kind,
    text: str,
    value: Callable[[Any], Value | ByLabels | None],
    *vllm: str,
    labels: tuple[str, ...] = (),
    mean: bool = False,
) -> Metric:
    """Of each target or drafter, or by ``labels`` of each; None: it has none."""

    def read(status: ClusterStatus) -> Readings:
        for one in status.targets if role == "target" else status.drafters:
            found = value(one)
            if isinstance(found, Mapping):
                yield from (((one.name, *names), number) for names, number in found.items())
            elif found is not None:
                yield (one.name,), found if isinstance(found, HistogramCounts) else float(found)

    return Metric(f"{role}_{name}", kind, text, (role, *labels), read=read, vllm=dict.fromkeys(vllm, ()), mean=mean)


_target, _drafter = partial(_each, "target"), partial(_each, "drafter")


def _of_lens(counts: tuple[int, ...]) -> HistogramCounts:
    """Of draft lengths from 0 on: bounds up to MAX_DRAFT_LEN, so that nothing lies above them."""
    buckets, total = [0] * (len(_LENS) + 1), 0
    for length, num in enumerate(counts):
        buckets[bisect_left(_LENS, length)] += num
        total += length * num
    return HistogramCounts(_LENS, tuple(buckets), float(total))


def _outcomes(drafter: DrafterStatus) -> ByLabels:
    one = drafter.counts.outcomes
    named = {"own": one.num_own, "hit": one.num_hits, "missed": one.num_missed}
    return {(name,): float(num) for name, num in named.items()} if one.num_commits else {}


def _by_position(counts: Iterable[int]) -> ByLabels:
    return {(str(position),): float(num) for position, num in enumerate(counts)}


def _reserved(status: ClusterStatus) -> Readings:
    for role, several in (("target", status.targets), ("drafter", status.drafters)):
        for one in several:
            yield (role, one.name, "cpu"), one.num_cpus
            yield (role, one.name, "gpu"), one.num_gpus


def objective_counts(counts: SloCounts) -> ByLabels:
    """By the labels slo_class, objective and outcome."""
    return {
        (counts.name, objective, outcome): float(getattr(counts, f"num_{objective}_{outcome}"))
        for objective in ("ttft", "tpot")
        for outcome in ("met", "missed")
    }


def _objectives(target: TargetStatus) -> ByLabels:
    return {labels: num for counts in target.slo for labels, num in objective_counts(counts).items()}


def _scale_events(status: ClusterStatus) -> Readings:
    for counts in status.scale_counts:
        yield (counts.name, "up"), float(counts.num_up)
        yield (counts.name, "down"), float(counts.num_down)


def _kv_usage(target: TargetStatus) -> float:
    return 1 - target.num_free_blocks / target.num_blocks if target.num_blocks else 0.0


METRICS = (
    _counter("requests", "HTTP requests that were answered.", labels=("endpoint", "status")),
    Metric("requests_in_flight", "gauge", "HTTP requests in progress."),
    Metric("requests_queued", "gauge", "HTTP requests waiting for admission in this process."),
    Metric(
        "choices_finished",
        "counter",
        "Choices that ended, by reason; abort: the client disconnected or the deadline passed.",
        ("finished_reason",),
        vllm={"request_success": ("finished_reason",)},
    ),
    # Tokens.
    _counter("prompt_tokens", "Prompt tokens of calls that ended and were not refused.", "prompt_tokens"),
    _counter("completion_tokens", "Generated tokens.", "generation_tokens"),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in prefix caches.",
        "prefix_cache_queries",
        "gpu_prefix_cache_queries",
    ),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits", "gpu_prefix_cache_hits"),
    _histogram("choice_prompt_tokens", "Prompt tokens of a finished choice.", "request_prompt_tokens", buckets=COUNTS),
    _histogram(
        "choice_completion_tokens", "Generated tokens of a finished choice.", "request_generation_tokens", buckets=COUNTS
    ),
    _histogram(
        "choice_max_tokens",
        "Limit on the generated tokens of a finished choice.",
        "request_params_max_tokens",
        "request_max_num_generation_tokens",
        buckets=COUNTS,
    ),
    # Drafting.
    _counter("prediction_tokens_accepted", "Draft tokens that are part of answers.", labels=("drafter",)),
    _counter("prediction_tokens_rejected", "Draft tokens verified and rejected.", labels=("drafter",)),
    _counter("drafts_verified", "Drafts verified: one per request and pass.", "spec_decode_num_drafts"),
    _counter(
        "draft_tokens_verified",
        "Draft tokens verified, by position from 0.",
        "spec_decode_num_draft_tokens",
        labels=("position",),
    ),
    Metric(
        "draft_tokens_accepted",
        "counter",
        "Draft tokens accepted, by position from 0.",
        ("position",),
        vllm={"spec_decode_num_accepted_tokens": (), "spec_decode_num_accepted_tokens_per_pos": ("position",)},
    ),
    # Times.
    _histogram("queue_seconds", "Time that a call waited for admission in this process."),
    _histogram("ttft_seconds", "Time to the first token of a choice.", "time_to_first_token_seconds"),
    _histogram(
        "inter_token_seconds",
        "Time between the target's passes that yielded tokens of a choice.",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        buckets=TOKEN_S,
    ),
    _histogram(
        "tpot_seconds",
        "Time per token of a choice after its first.",
        "request_time_per_output_token_seconds",
        buckets=TOKEN_S,
    ),
    _histogram("e2e_seconds", "Time to the last token of a finished choice.", "e2e_request_latency_seconds"),
    _histogram("choice_queue_seconds", "Time until a target began to compute the choice.", "request_queue_time_seconds"),
    _histogram("prefill_seconds", "Time from a choice's first pass to its first token.", "request_prefill_time_seconds"),
    _histogram("decode_seconds", "Time from a choice's first token to its last.", "request_decode_time_seconds"),
    _histogram("inference_seconds", "Time from a choice's first pass to its last token.", "request_inference_time_seconds"),
    _counter(
        "domain_tokens_verified",
        "Draft tokens verified, by metadata.domain of the call, else its form.",
        labels=("drafter", "domain"),
    ),
    _counter("tenant_tokens", "Tokens of calls that ended, by tenant: prompt or output.", labels=("tenant", "kind")),
    _counter(
        "tenant_over_budget", "Calls refused by the tenant's budget of requests or tokens.", labels=("tenant", "budget")
    ),
    _counter("domain_tokens_accepted", "Draft tokens accepted, by the domain of the call.", labels=("drafter", "domain")),
    _counter("adapter_tokens_verified", "Draft tokens verified, by the call's LoRA adapter.", labels=("drafter", "adapter")),
    _counter("adapter_tokens_accepted", "Draft tokens accepted, by the call's LoRA adapter.", labels=("drafter", "adapter")),
    # Service-level objectives.
    Metric(
        "slo_objectives", "counter", "Objectives of answers, as clients saw them.", ("slo_class", "objective", "outcome")
    ),
    _counter("slo_shed", "Choices refused because their first token would have come too late.", labels=("slo_class",)),
    _histogram("slo_ttft_seconds", "Time to the first token of an answer, by class.", labels=("slo_class",)),
    _histogram(
        "slo_tpot_seconds", "Time per token of an answer after the first, by class.", labels=("slo_class",), buckets=TOKEN_S
    ),
    _target(
        "slo_objectives",
        "counter",
        "Objectives of answers that the target completed, as it saw them.",
        _objectives,
        labels=("slo_class", "objective", "outcome"),
    ),
    _target(
        "slo_refused",
        "counter",
        "Requests that the target refused because their first token would have come too late.",
        lambda t: {(one.name,): float(one.num_refused) for one in t.slo},
        labels=("slo_class",),
    ),
    # Targets.
    _whole("routing_table_version", "gauge", "Version of the newest routing table.", lambda s: s.table_version),
    _whole(
        "requests_resumed",
        "counter",
        "Requests continued at another target, after a loss.",
        lambda s: s.num_resumed,
        own=True,
    ),
    _whole(
        "supervisor_kills",
        "counter",
        "Supervisors that did not answer and were killed by this process.",
        lambda s: s.num_supervisor_kills,
        own=True,
    ),
    _whole(
        "tls_not_after_timestamp_seconds",
        "gauge",
        "POSIX time at which a certificate for links of this process's machine, an intermediate or their authority expires. "
        "Unusable files count as expiring now; the log has the reason.",
        lambda s: s.tls_not_after_s,
        own=True,
    ),
    Metric(
        "scale_events",
        "counter",
        "Changes of the wanted replicas of targets or of a drafter.",
        ("replicas_of", "direction"),
        read=_scale_events,
    ),
    _target("ready", "gauge", "1 if the target accepts requests, else 0.", lambda t: t.state == "ready"),
    _target("draining", "gauge", "1 if the target only completes what it has, else 0.", lambda t: t.state == "draining"),
    _target("running", "gauge", "Requests in the target's batch.", lambda t: t.num_running, "num_requests_running"),
    _target("waiting", "gauge", "Requests waiting for the target's batch.", lambda t: t.num_waiting, "num_requests_waiting"),
    _target(
        "preemptions",
        "counter",
        "Requests whose KV cache was freed, to be computed again.",
        lambda t: t.num_preempted,
        "num_preemptions",
    ),
    _target(
        "failed_observations",
        "counter",
        "Failures to measure or learn; tokens do not depend on them.",
        lambda t: t.num_failed_observations,
    ),
    _target("blocks", "gauge", "Blocks of the KV cache.", lambda t: t.num_blocks),
    _target("free_blocks", "gauge", "Free blocks of the KV cache.", lambda t: t.num_free_blocks),
    _target(
        "kv_usage_ratio",
        "gauge",
        "Share of the KV cache's blocks in use, from 0 to 1.",
        _kv_usage,
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        mean=True,
    ),
    _target(
        "tokens_per_second", "gauge", "Tokens that the target committed in its last busy second.", lambda t: t.tokens_per_s
    ),
    _target("decode_seconds", "counter", "Time of rounds that only decoded.", lambda t: t.drafting.decode_s),
    _target(
        "plain_decode_seconds", "counter", "Predicted time of these rounds without drafts.", lambda t: t.drafting.plain_s
    ),
    _target(
        "rejected_row_seconds",
        "counter",
        "Predicted time of the rejected draft tokens in them.",
        lambda t: t.drafting.rejected_s,
    ),
    _target("step_seconds", "gauge", "Moving average of the time of the target's round.", lambda t: t.step_ms / 1000),
    _target("round_seconds", "histogram", "Time of a round: mail, plan, pass and commits.", lambda t: t.rounds_s),
    _target("pass_rows", "histogram", "Rows of a pass: prompt tokens, committed tokens and drafts.", lambda t: t.rows),
    _target("pass_requests", "histogram", "Requests that got tokens in a round.", lambda t: t.batch),
    Metric(
        "reserved_resources",
        "gauge",
        "CPUs and GPUs reserved for a target or for one replica of a drafter; prices make them costs.",
        ("role", "process", "resource"),
        read=_reserved,
    ),
    # Drafters.
    _drafter("ready", "gauge", "1 if the drafter is ready, else 0.", lambda d: d.state == "ready"),
    _drafter("requests", "gauge", "Requests that the drafter drafts for.", lambda d: d.num_requests),
    _drafter("verified", "counter", "Draft tokens of the drafter verified.", lambda d: d.num_proposed),
    _drafter("accepted", "counter", "Draft tokens of the drafter accepted.", lambda d: d.num_accepted),
    _drafter("restarts", "counter", "Restarts of the drafter's process.", lambda d: d.num_restarts),
    _drafter(
        "memory_bytes",
        "gauge",
        "Predicted memory of the drafter on its device.",
        lambda d: {(d.device,): float(d.num_bytes)} if d.device and d.num_bytes is not None else None,
        labels=("device",),
    ),
    _drafter("loads", "counter", "Loads of the drafter into memory.", lambda d: d.num_loads),
    _drafter("evictions", "counter", "Evictions of the drafter from memory.", lambda d: d.num_evictions),
    _drafter(
        "fallbacks", "counter", "Loads of the drafter on a CPU because its GPU had no room.", lambda d: d.num_fallbacks
    ),
    _drafter(
        "reply_seconds",
        "gauge",
        "Moving average of its reply time.",
        lambda d: None if d.reply_ms is None else d.reply_ms / 1000,
    ),
    _drafter(
        "acceptance_ratio",
        "gauge",
        "Moving average of the probability that a draft token is right if those before it are, from 0 to 1.",
        lambda d: d.counts.acceptance,
    ),
    _drafter("drafted_length", "histogram", "Tokens of proposals that came in time.", lambda d: _of_lens(d.counts.drafted)),
    _drafter(
        "verified_length", "histogram", "Tokens of a draft that a pass verified.", lambda d: _of_lens(d.counts.verified)
    ),
    _drafter(
        "accepted_length",
        "histogram",
        "Accepted tokens of a verified draft, no bonus token.",
        lambda d: _of_lens(d.counts.accepted),
    ),
    _drafter(
        "position_verified",
        "counter",
        "Draft tokens verified, by position from 0.",
        lambda d: _by_position(d.counts.verified_at),
        labels=("position",),
    ),
    _drafter(
        "position_accepted",
        "counter",
        "Draft tokens accepted, by position from 0.",
        lambda d: _by_position(d.counts.accepted_at),
        labels=("position",),
    ),
    _drafter("hold_seconds", "histogram", "Waits of requests for a proposal of the drafter.", lambda d: d.counts.hold_s),
    _drafter("holds_expired", "counter", "Waits that ended before the proposal came.", lambda d: d.counts.num_late),
    _drafter(
        "reply_time_seconds", "histogram", "Time from a commit to the arrival of its proposal.", lambda d: d.counts.reply_s
    ),
    _drafter(
        "link_seconds",
        "histogram",
        "Waits of batches of drafts for hidden states.",
        lambda d: d.counts.link_s if d.counts.num_fed else None,
    ),
    _drafter("fed", "counter", "Tokens whose hidden states were sent.", lambda d: d.counts.num_fed or None),
    _drafter("fed_bytes", "counter", "Bytes of these states.", lambda d: d.counts.fed_bytes or None),
    _drafter("batch_seconds", "histogram", "Time to draft a batch, as the drafter measures it.", lambda d: d.counts.batch_s),
    _drafter(
        "outcomes",
        "counter",
        "Commits after its drafts: as it had guessed (own), another outcome that was prepared (hit), or neither (missed).",
        _outcomes,
        labels=("outcome",),
    ),
    _drafter(
        "outcomes_prepared",
        "counter",
        "Outcomes that the drafter prepared beside its own guess.",
        lambda d: d.counts.outcomes.num_prepared if d.counts.outcomes.num_commits else None,
    ),
    _drafter("stale", "counter", "Proposals that came too late to be verified.", lambda d: d.counts.num_stale),
    _drafter("resyncs", "counter", "Sessions that the drafter asked for anew.", lambda d: d.counts.num_resyncs),
    _drafter("unsound", "counter", "Messages of the drafter with invalid parts.", lambda d: d.num_unsound),
)


def page() -> str:
    """All metrics, as the Markdown of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "All metrics of `/metrics`, printed by `outrider metrics list` from `deploy/api/metric_table.py`. Counters end in",
        "`_total`; histograms are exported as `_bucket`, `_sum` and `_count`.",
        "",
        "| metric | kind | labels | meaning | vLLM's name |",
        "|---|---|---|---|---|",
        "| `outrider_cluster_up` | gauge | | 1 if the cluster answers, else 0. | |",
    ]
    for row in METRICS:
        name = f"`outrider_{row.name}{'_total' if row.kind == 'counter' else ''}`"
        labels = ", ".join(f"`{label}`" for label in row.labels)
        vllm = ", ".join(f"`vllm:{other}{'_total' if row.kind == 'counter' else ''}`" for other in row.vllm)
        lines.append("| " + " | ".join((name, row.kind, labels, row.text, vllm)) + " |")
    return "\n".join(lines) + "\n"
