"""The metrics of ``/metrics`` in one table, with the names that vLLM's dashboards use for them."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.client import ClusterStatus, DrafterStatus, DraftingEffect, TargetStatus
from cluster.drafting_counts import DraftingCounts
from cluster.histograms import HistogramCounts
from cluster.slo import SloCounts

# Upper bounds in seconds. Metrics appends api.request_deadline_s (600 s by default) where it exceeds the last of them.
_CALL = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
_COUNT = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)

# Draft lengths; 0 is a bucket of its own, and the last is cluster.types.MAX_DRAFT_LEN.
_LENS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)

Kind = Literal["counter", "gauge", "histogram"]
Reading = Iterable[tuple[tuple[str, ...], float]]  # label values, and the value
Readings = Reading | Iterable[tuple[tuple[str, ...], HistogramCounts]]


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
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[ClusterStatus], Readings] | None = None
    vllm: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mean: bool = False


def _counter(name: str, text: str, *vllm: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", text, labels, vllm=dict.fromkeys(vllm, ()))


def _histogram(name: str, text: str, *vllm: str, buckets: tuple[float, ...] = _CALL) -> Metric:
    return Metric(name, "histogram", text, buckets=buckets, vllm=dict.fromkeys(vllm, ()))


def _target(name: str, text: str, value: Callable[[TargetStatus], float], *vllm: str, mean: bool = False) -> Metric:
    def read(status: ClusterStatus) -> Reading:
        return [((target.name,), float(value(target))) for target in status.targets]

    return Metric(f"target_{name}", "gauge", text, ("target",), read=read, vllm=dict.fromkeys(vllm, ()), mean=mean)


def _drafting(name: str, text: str, value: Callable[[DraftingEffect], float]) -> Metric:
    return replace(_target(name, text, lambda target: value(target.drafting)), kind="counter")


def _drafter(name: str, kind: Kind, text: str, value: Callable[[DrafterStatus], float | None]) -> Metric:
    def read(status: ClusterStatus) -> Reading:
        values = [((drafter.name,), value(drafter)) for drafter in status.drafters]
        return [(labels, float(number)) for labels, number in values if number is not None]

    return Metric(f"drafter_{name}", kind, text, ("drafter",), read=read)


def _target_histogram(name: str, text: str, value: Callable[[TargetStatus], HistogramCounts | None]) -> Metric:
    def read(status: ClusterStatus) -> Readings:
        counts = [((target.name,), value(target)) for target in status.targets]
        return [(labels, one) for labels, one in counts if one is not None]

    return Metric(f"target_{name}", "histogram", text, ("target",), read=read)


def _drafts(name: str, text: str, value: Callable[[DraftingCounts], HistogramCounts]) -> Metric:
    """A histogram of each drafter, over all targets."""

    def read(status: ClusterStatus) -> Readings:
        return [((drafter.name,), value(drafter.counts)) for drafter in status.drafters]

    return Metric(f"drafter_{name}", "histogram", text, ("drafter",), read=read)


def _at_positions(name: str, text: str, value: Callable[[DraftingCounts], Sequence[int]]) -> Metric:
    def read(status: ClusterStatus) -> Reading:
        for drafter in status.drafters:
            for position, num in enumerate(value(drafter.counts)):
                yield (drafter.name, str(position)), float(num)

    return Metric(f"drafter_{name}", "counter", text, ("drafter", "position"), read=read)


def _outcomes(status: ClusterStatus) -> Reading:
    for drafter in status.drafters:
        outcomes = drafter.counts.outcomes
        if outcomes.num_commits:
            yield (drafter.name, "own"), float(outcomes.num_own)
            yield (drafter.name, "hit"), float(outcomes.num_hits)
            yield (drafter.name, "missed"), float(outcomes.num_missed)


def _of_lens(counts: tuple[int, ...]) -> HistogramCounts:
    """Of draft lengths from 0 on: bounds up to MAX_DRAFT_LEN, so that nothing lies above them."""
    buckets, total = [0] * (len(_LENS) + 1), 0
    for length, num in enumerate(counts):
        buckets[bisect_left(_LENS, length)] += num
        total += length * num
    return HistogramCounts(_LENS, tuple(buckets), float(total))


def _reserved(status: ClusterStatus) -> Reading:
    for target in status.targets:
        yield ("target", target.name, "cpu"), target.num_cpus
        yield ("target", target.name, "gpu"), target.num_gpus
    for drafter in status.drafters:
        yield ("drafter", drafter.name, "cpu"), drafter.num_cpus
        yield ("drafter", drafter.name, "gpu"), drafter.num_gpus


def _memory(status: ClusterStatus) -> Reading:
    return [((d.name, d.device), float(d.num_bytes)) for d in status.drafters if d.device and d.num_bytes is not None]


def objective_counts(counts: SloCounts) -> Reading:
    """By the labels slo_class, objective and outcome."""
    yield (counts.name, "ttft", "met"), float(counts.num_ttft_met)
    yield (counts.name, "ttft", "missed"), float(counts.num_ttft_missed)
    yield (counts.name, "tpot", "met"), float(counts.num_tpot_met)
    yield (counts.name, "tpot", "missed"), float(counts.num_tpot_missed)


def _objectives(status: ClusterStatus) -> Reading:
    for target in status.targets:
        for counts in target.slo:
            for labels, value in objective_counts(counts):
                yield (target.name, *labels), value


def _scale_events(status: ClusterStatus) -> Reading:
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
    _counter("prompt_tokens", "Prompt tokens.", "prompt_tokens"),
    _counter("completion_tokens", "Generated tokens.", "generation_tokens"),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        "prefix_cache_queries",
        "gpu_prefix_cache_queries",
    ),
    _counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        "prefix_cache_hits",
        "gpu_prefix_cache_hits",
    ),
    _histogram("choice_prompt_tokens", "Prompt tokens of a finished choice.", "request_prompt_tokens", buckets=_COUNT),
    _histogram(
        "choice_completion_tokens",
        "Generated tokens of a finished choice.",
        "request_generation_tokens",
        buckets=_COUNT,
    ),
    _histogram(
        "choice_max_tokens",
        "Limit on the generated tokens of a finished choice.",
        "request_params_max_tokens",
        "request_max_num_generation_tokens",
        buckets=_COUNT,
    ),
    # Drafting.
    _counter("prediction_tokens_accepted", "Draft tokens that are part of answers.", labels=("drafter",)),
    _counter("prediction_tokens_rejected", "Draft tokens verified and rejected.", labels=("drafter",)),
    _counter("drafts_verified", "Drafts verified: one per request and pass.", "spec_decode_num_drafts"),
    _counter(
        "draft_tokens_verified",
        "Draft tokens verified, by position in the draft from 0.",
        "spec_decode_num_draft_tokens",
        labels=("position",),
    ),
    Metric(
        "draft_tokens_accepted",
        "counter",
        "Draft tokens accepted, by position in the draft from 0.",
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
        buckets=_TOKEN,
    ),
    _histogram(
        "tpot_seconds",
        "Mean time per token of a choice after the first.",
        "request_time_per_output_token_seconds",
        buckets=_TOKEN,
    ),
    _histogram("e2e_seconds", "Time to the last token of a finished choice.", "e2e_request_latency_seconds"),
    _histogram("choice_queue_seconds", "Time until a target began to compute the choice.", "request_queue_time_seconds"),
    _histogram(
        "prefill_seconds", "Time from the start of a choice's first pass to its first token.", "request_prefill_time_seconds"
    ),
    _histogram("decode_seconds", "Time from a choice's first token to its last.", "request_decode_time_seconds"),
    _histogram(
        "inference_seconds",
        "Time from the start of a choice's first pass to its last token.",
        "request_inference_time_seconds",
    ),
    _counter(
        "domain_tokens_verified",
        "Draft tokens verified, by the domain of the call: metadata.domain, else the form of the call.",
        labels=("drafter", "domain"),
    ),
    _counter("tenant_tokens", "Tokens of calls that ended, by tenant: prompt or output.", labels=("tenant", "kind")),
    _counter(
        "tenant_over_budget", "Calls refused by the tenant's budget of requests or tokens.", labels=("tenant", "budget")
    ),
    _counter("domain_tokens_accepted", "Draft tokens accepted, by the domain of the call.", labels=("drafter", "domain")),
    # Service-level objectives.
    Metric(
        "slo_objectives",
        "counter",
        "Objectives of complete answers, as their clients saw them.",
        ("slo_class", "objective", "outcome"),
    ),
    _counter("slo_shed", "Choices refused because their first token would have come too late.", labels=("slo_class",)),
    replace(_histogram("slo_ttft_seconds", "Time to the first token of an answer, by class."), labels=("slo_class",)),
    replace(
        _histogram("slo_tpot_seconds", "Mean time per token of an answer after the first, by class.", buckets=_TOKEN),
        labels=("slo_class",),
    ),
    Metric(
        "target_slo_objectives",
        "counter",
        "Objectives of answers that the target completed, as it saw them.",
        ("target", "slo_class", "objective", "outcome"),
        read=_objectives,
    ),
    Metric(
        "target_slo_refused",
        "counter",
        "Requests that the target refused because their first token would have come too late.",
        ("target", "slo_class"),
        read=lambda status: [((t.name, one.name), float(one.num_refused)) for t in status.targets for one in t.slo],
    ),
    # Targets.
    Metric(
        "routing_table_version",
        "gauge",
        "Version of the newest routing table.",
        read=lambda status: [((), float(status.table_version))],
    ),
    Metric(
        "requests_resumed",
        "counter",
        "Continuations of requests at another target, after the loss of theirs.",
        read=lambda status: [((), float(status.num_resumed))],
    ),
    Metric(
        "supervisor_kills",
        "counter",
        "Times that this process killed a supervisor that did not answer, for Ray to start another.",
        read=lambda status: [((), float(status.num_supervisor_kills))],
    ),
    Metric(
        "scale_events",
        "counter",
        "Changes of the wanted number of replicas of targets or of a drafter.",
        ("replicas_of", "direction"),
        read=_scale_events,
    ),
    _target("ready", "1 if the target accepts requests, else 0.", lambda t: t.state == "ready"),
    _target(
        "draining",
        "1 if the target takes no more requests and ends when it has none, else 0.",
        lambda t: t.state == "draining",
    ),
    _target("running", "Requests in the target's batch.", lambda t: t.num_running, "num_requests_running"),
    _target("waiting", "Requests waiting for the target's batch.", lambda t: t.num_waiting, "num_requests_waiting"),
    replace(
        _target(
            "preemptions",
            "Requests whose KV cache was freed for older requests, to be computed again.",
            lambda t: t.num_preempted,
            "num_preemptions",
        ),
        kind="counter",
    ),
    _target("blocks", "Blocks of the KV cache.", lambda t: t.num_blocks),
    _target("free_blocks", "Free blocks of the KV cache.", lambda t: t.num_free_blocks),
    _target(
        "kv_usage_ratio",
        "Share of the KV cache's blocks in use, from 0 to 1.",
        _kv_usage,
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        mean=True,
    ),
    _target("tokens_per_second", "Tokens that the target committed in its last busy second.", lambda t: t.tokens_per_s),
    _drafting("decode_seconds", "Time of rounds that only decoded.", lambda one: one.decode_s),
    _drafting(
        "plain_decode_seconds",
        "Time that these rounds would have taken without drafts, as the cost model predicts it.",
        lambda one: one.plain_s,
    ),
    _drafting(
        "rejected_row_seconds", "Time that rejected draft tokens took in them, as predicted.", lambda one: one.rejected_s
    ),
    _target("step_seconds", "Moving average of the time of the target's round.", lambda t: t.step_ms / 1000),
    _target_histogram("round_seconds", "Time of a round: mail, plan, pass and commits.", lambda t: t.rounds_s),
    _target_histogram("pass_rows", "Rows of a pass: prompt tokens, committed tokens and drafts.", lambda t: t.rows),
    _target_histogram("pass_requests", "Requests that got tokens in a round.", lambda t: t.batch),
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
    Metric(
        "drafter_memory_bytes",
        "gauge",
        "Predicted memory of the drafter on its device.",
        ("drafter", "device"),
        read=_memory,
    ),
    _drafter("loads", "counter", "Loads of the drafter into memory.", lambda d: d.num_loads),
    _drafter("evictions", "counter", "Evictions of the drafter from memory.", lambda d: d.num_evictions),
    _drafter(
        "fallbacks", "counter", "Loads of the drafter on a CPU because its GPU had no room.", lambda d: d.num_fallbacks
    ),
    _drafter(
        "reply_seconds",
        "gauge",
        "Moving average of the drafter's reply time.",
        lambda d: None if d.reply_ms is None else d.reply_ms / 1000,
    ),
    _drafter(
        "acceptance_ratio",
        "gauge",
        "Moving average of the probability that a draft token is right if those before it are, from 0 to 1.",
        lambda d: d.counts.acceptance,
    ),
    _drafts("drafted_length", "Tokens of proposals that came in time.", lambda one: _of_lens(one.drafted)),
    _drafts("verified_length", "Tokens of a draft that a pass verified.", lambda one: _of_lens(one.verified)),
    _drafts(
        "accepted_length",
        "Tokens accepted of a draft that was verified, bonus excluded.",
        lambda one: _of_lens(one.accepted),
    ),
    _at_positions(
        "position_verified", "Draft tokens verified, by position in the draft from 0.", lambda one: one.verified_at
    ),
    _at_positions(
        "position_accepted", "Draft tokens accepted, by position in the draft from 0.", lambda one: one.accepted_at
    ),
    _drafts("hold_seconds", "Waits of requests for a proposal of the drafter.", lambda one: one.hold_s),
    _drafter("holds_expired", "counter", "Waits that ended before the proposal came.", lambda d: d.counts.num_late),
    _drafts("reply_time_seconds", "Time from a commit to the arrival of its proposal.", lambda one: one.reply_s),
    _drafts("batch_seconds", "Time to draft a batch, as the drafter measures it.", lambda one: one.batch_s),
    Metric(
        "drafter_outcomes",
        "counter",
        "Commits after its drafts: as it had guessed (own), another outcome that was prepared (hit), or neither (missed).",
        ("drafter", "outcome"),
        read=_outcomes,
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
