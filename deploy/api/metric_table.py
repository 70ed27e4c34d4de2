"""The metrics of ``/metrics`` in one table, with the names that vLLM's dashboards use for them."""

from bisect import bisect_left
from dataclasses import replace

from cluster.client import ClusterStatus, TargetStatus
from cluster.histograms import HistogramCounts
from cluster.slo import SloCounts
from deploy.api.metric_kinds import (
    COUNTS,
    TOKEN_S,
    Metric,
    Reading,
    counter,
    drafter_histogram,
    drafter_metric,
    drafting_counter,
    histogram,
    position_counter,
    target_gauge,
    target_histogram,
)

# Draft lengths; 0 is a bucket of its own, and the last is cluster.types.MAX_DRAFT_LEN.
_LENS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)


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
    counter("requests", "HTTP requests that were answered.", labels=("endpoint", "status")),
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
    counter("prompt_tokens", "Prompt tokens of calls that ended and were not refused.", "prompt_tokens"),
    counter("completion_tokens", "Generated tokens.", "generation_tokens"),
    counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        "prefix_cache_queries",
        "gpu_prefix_cache_queries",
    ),
    counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        "prefix_cache_hits",
        "gpu_prefix_cache_hits",
    ),
    histogram("choice_prompt_tokens", "Prompt tokens of a finished choice.", "request_prompt_tokens", buckets=COUNTS),
    histogram(
        "choice_completion_tokens",
        "Generated tokens of a finished choice.",
        "request_generation_tokens",
        buckets=COUNTS,
    ),
    histogram(
        "choice_max_tokens",
        "Limit on the generated tokens of a finished choice.",
        "request_params_max_tokens",
        "request_max_num_generation_tokens",
        buckets=COUNTS,
    ),
    # Drafting.
    counter("prediction_tokens_accepted", "Draft tokens that are part of answers.", labels=("drafter",)),
    counter("prediction_tokens_rejected", "Draft tokens verified and rejected.", labels=("drafter",)),
    counter("drafts_verified", "Drafts verified: one per request and pass.", "spec_decode_num_drafts"),
    counter(
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
    histogram("queue_seconds", "Time that a call waited for admission in this process."),
    histogram("ttft_seconds", "Time to the first token of a choice.", "time_to_first_token_seconds"),
    histogram(
        "inter_token_seconds",
        "Time between the target's passes that yielded tokens of a choice.",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        buckets=TOKEN_S,
    ),
    histogram(
        "tpot_seconds",
        "Mean time per token of a choice after the first.",
        "request_time_per_output_token_seconds",
        buckets=TOKEN_S,
    ),
    histogram("e2e_seconds", "Time to the last token of a finished choice.", "e2e_request_latency_seconds"),
    histogram("choice_queue_seconds", "Time until a target began to compute the choice.", "request_queue_time_seconds"),
    histogram(
        "prefill_seconds", "Time from the start of a choice's first pass to its first token.", "request_prefill_time_seconds"
    ),
    histogram("decode_seconds", "Time from a choice's first token to its last.", "request_decode_time_seconds"),
    histogram(
        "inference_seconds",
        "Time from the start of a choice's first pass to its last token.",
        "request_inference_time_seconds",
    ),
    counter(
        "domain_tokens_verified",
        "Draft tokens verified, by the domain of the call: metadata.domain, else the form of the call.",
        labels=("drafter", "domain"),
    ),
    counter("tenant_tokens", "Tokens of calls that ended, by tenant: prompt or output.", labels=("tenant", "kind")),
    counter(
        "tenant_over_budget", "Calls refused by the tenant's budget of requests or tokens.", labels=("tenant", "budget")
    ),
    counter("domain_tokens_accepted", "Draft tokens accepted, by the domain of the call.", labels=("drafter", "domain")),
    counter("adapter_tokens_verified", "Draft tokens verified, by the call's LoRA adapter.", labels=("drafter", "adapter")),
    counter("adapter_tokens_accepted", "Draft tokens accepted, by the call's LoRA adapter.", labels=("drafter", "adapter")),
    # Service-level objectives.
    Metric(
        "slo_objectives",
        "counter",
        "Objectives of complete answers, as their clients saw them.",
        ("slo_class", "objective", "outcome"),
    ),
    counter("slo_shed", "Choices refused because their first token would have come too late.", labels=("slo_class",)),
    replace(histogram("slo_ttft_seconds", "Time to the first token of an answer, by class."), labels=("slo_class",)),
    replace(
        histogram("slo_tpot_seconds", "Mean time per token of an answer after the first, by class.", buckets=TOKEN_S),
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
        "router_regret_ratio",
        "histogram",
        "By slot: share of the best drafters' tokens per second that the chosen ones miss, as the policy hedge estimates.",
        read=lambda status: [] if status.regret is None else [((), status.regret)],
    ),
    Metric(
        "requests_resumed",
        "counter",
        "Continuations of requests at another target, after the loss of theirs.",
        read=lambda status: [((), float(status.num_resumed))],
        own=True,
    ),
    Metric(
        "supervisor_kills",
        "counter",
        "Times that this process killed a supervisor that did not answer, for Ray to start another.",
        read=lambda status: [((), float(status.num_supervisor_kills))],
        own=True,
    ),
    Metric(
        "tls_not_after_timestamp_seconds",
        "gauge",
        "POSIX time at which a certificate for links of this process's machine, an intermediate or their authority expires. "
        "Unusable files count as expiring now; the log has the reason.",
        read=lambda status: [] if status.tls_not_after_s is None else [((), status.tls_not_after_s)],
        own=True,
    ),
    Metric(
        "scale_events",
        "counter",
        "Changes of the wanted number of replicas of targets or of a drafter.",
        ("replicas_of", "direction"),
        read=_scale_events,
    ),
    target_gauge("ready", "1 if the target accepts requests, else 0.", lambda t: t.state == "ready"),
    target_gauge(
        "draining",
        "1 if the target takes no more requests and ends when it has none, else 0.",
        lambda t: t.state == "draining",
    ),
    target_gauge("running", "Requests in the target's batch.", lambda t: t.num_running, "num_requests_running"),
    target_gauge("waiting", "Requests waiting for the target's batch.", lambda t: t.num_waiting, "num_requests_waiting"),
    replace(
        target_gauge(
            "preemptions",
            "Requests whose KV cache was freed for older requests, to be computed again.",
            lambda t: t.num_preempted,
            "num_preemptions",
        ),
        kind="counter",
    ),
    replace(
        target_gauge(
            "failed_observations",
            "Failures to measure, trace or learn in rounds; tokens do not depend on them.",
            lambda t: t.num_failed_observations,
        ),
        kind="counter",
    ),
    target_gauge("blocks", "Blocks of the KV cache.", lambda t: t.num_blocks),
    target_gauge("free_blocks", "Free blocks of the KV cache.", lambda t: t.num_free_blocks),
    target_gauge(
        "kv_usage_ratio",
        "Share of the KV cache's blocks in use, from 0 to 1.",
        _kv_usage,
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        mean=True,
    ),
    target_gauge("tokens_per_second", "Tokens that the target committed in its last busy second.", lambda t: t.tokens_per_s),
    drafting_counter("decode_seconds", "Time of rounds that only decoded.", lambda one: one.decode_s),
    drafting_counter(
        "plain_decode_seconds",
        "Time that these rounds would have taken without drafts, as the cost model predicts it.",
        lambda one: one.plain_s,
    ),
    drafting_counter(
        "rejected_row_seconds", "Time that rejected draft tokens took in them, as predicted.", lambda one: one.rejected_s
    ),
    target_gauge("step_seconds", "Moving average of the time of the target's round.", lambda t: t.step_ms / 1000),
    target_histogram("round_seconds", "Time of a round: mail, plan, pass and commits.", lambda t: t.rounds_s),
    target_histogram("pass_rows", "Rows of a pass: prompt tokens, committed tokens and drafts.", lambda t: t.rows),
    target_histogram("pass_requests", "Requests that got tokens in a round.", lambda t: t.batch),
    Metric(
        "reserved_resources",
        "gauge",
        "CPUs and GPUs reserved for a target or for one replica of a drafter; prices make them costs.",
        ("role", "process", "resource"),
        read=_reserved,
    ),
    # Drafters.
    drafter_metric("ready", "gauge", "1 if the drafter is ready, else 0.", lambda d: d.state == "ready"),
    drafter_metric("requests", "gauge", "Requests that the drafter drafts for.", lambda d: d.num_requests),
    drafter_metric("verified", "counter", "Draft tokens of the drafter verified.", lambda d: d.num_proposed),
    drafter_metric("accepted", "counter", "Draft tokens of the drafter accepted.", lambda d: d.num_accepted),
    drafter_metric("restarts", "counter", "Restarts of the drafter's process.", lambda d: d.num_restarts),
    Metric(
        "drafter_memory_bytes",
        "gauge",
        "Predicted memory of the drafter on its device.",
        ("drafter", "device"),
        read=_memory,
    ),
    drafter_metric("loads", "counter", "Loads of the drafter into memory.", lambda d: d.num_loads),
    drafter_metric("evictions", "counter", "Evictions of the drafter from memory.", lambda d: d.num_evictions),
    drafter_metric(
        "fallbacks", "counter", "Loads of the drafter on a CPU because its GPU had no room.", lambda d: d.num_fallbacks
    ),
    drafter_metric(
        "reply_seconds",
        "gauge",
        "Moving average of the drafter's reply time.",
        lambda d: None if d.reply_ms is None else d.reply_ms / 1000,
    ),
    drafter_metric(
        "acceptance_ratio",
        "gauge",
        "Moving average of the probability that a draft token is right if those before it are, from 0 to 1.",
        lambda d: d.counts.acceptance,
    ),
    drafter_histogram("drafted_length", "Tokens of proposals that came in time.", lambda one: _of_lens(one.drafted)),
    drafter_histogram("verified_length", "Tokens of a draft that a pass verified.", lambda one: _of_lens(one.verified)),
    drafter_histogram(
        "accepted_length",
        "Tokens accepted of a draft that was verified, bonus excluded.",
        lambda one: _of_lens(one.accepted),
    ),
    position_counter(
        "position_verified", "Draft tokens verified, by position in the draft from 0.", lambda one: one.verified_at
    ),
    position_counter(
        "position_accepted", "Draft tokens accepted, by position in the draft from 0.", lambda one: one.accepted_at
    ),
    drafter_histogram("hold_seconds", "Waits of requests for a proposal of the drafter.", lambda one: one.hold_s),
    drafter_metric("holds_expired", "counter", "Waits that ended before the proposal came.", lambda d: d.counts.num_late),
    drafter_histogram("reply_time_seconds", "Time from a commit to the arrival of its proposal.", lambda one: one.reply_s),
    drafter_histogram("batch_seconds", "Time to draft a batch, as the drafter measures it.", lambda one: one.batch_s),
    Metric(
        "drafter_outcomes",
        "counter",
        "Commits after its drafts: as it had guessed (own), another outcome that was prepared (hit), or neither (missed).",
        ("drafter", "outcome"),
        read=_outcomes,
    ),
    drafter_metric(
        "outcomes_prepared",
        "counter",
        "Outcomes that the drafter prepared beside its own guess.",
        lambda d: d.counts.outcomes.num_prepared if d.counts.outcomes.num_commits else None,
    ),
    drafter_metric("stale", "counter", "Proposals that came too late to be verified.", lambda d: d.counts.num_stale),
    drafter_metric("resyncs", "counter", "Sessions that the drafter asked for anew.", lambda d: d.counts.num_resyncs),
    drafter_metric("unsound", "counter", "Messages of the drafter with invalid parts.", lambda d: d.num_unsound),
)
