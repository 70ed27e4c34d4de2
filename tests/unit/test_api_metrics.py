"""What /metrics exports, under our names and under vLLM's."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.client import ClusterStatus, DrafterStatus, ScaleCounts, TargetStatus
from cluster.counts import DraftingTally, Histogram, merged
from cluster.errors import LinkClosed
from cluster.messages import OutcomeReport
from cluster.types import Adapter, Commit, FinishReason, Prefill, Request
from deploy.api.draft_counts import DraftingCounts
from deploy.api.metric_table import METRICS, page
from deploy.api.metrics import MAX_DOMAINS, Metrics
from tests.support.api import chat_body, finishing, serving, token_ids
from tests.support.scripted import Step

CHAT = "/v1/chat/completions"

# The series that dashboards made for vLLM 0.6 to 0.32 and its load tests read, as far as they mean something here.
VLLM_SERIES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"),
    *("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
    *(
        f"vllm:{name}_{suffix}"
        for suffix in ("bucket", "sum", "count")
        for name in (
            *("time_to_first_token_seconds", "time_per_output_token_seconds", "inter_token_latency_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds", "request_time_per_output_token_seconds"),
            *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
            "request_params_max_tokens",
        )
    ),
}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Series:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    series = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(series) == len(samples), "a series is exported twice"
    return series


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def drafting(request: Request) -> list[Step]:
    """Three passes: three tokens of four drafts, one of two, and the end of the sequence."""
    base = len(request.prompt_token_ids)
    ids = token_ids("the answer is forty-two")[:4]
    return [
        Commit(request.id, base, ids[:3], 4, 2, "ngram", prefill=Prefill(32, 0.5, 0.25)),
        Commit(request.id, base + 3, ids[3:], 2, 0, "small"),
        *(replace(commit, base_len=base + 4) for commit in finishing(request, ())),
    ]


async def test_tokens_and_drafts_are_counted_by_position() -> None:
    async with serving(drafting) as (http, cluster):
        for _ in range(2):
            assert (await http.post(CHAT, json=chat_body(max_tokens=9))).status_code == 200
        series = parsed((await http.get("/metrics")).text)
        num_prompt_tokens = len(cluster.requests[0].prompt_token_ids)
    model = {"model_name": "scripted"}
    for name, vllm, expected in (
        ("outrider_prompt_tokens_total", "vllm:prompt_tokens_total", 2 * num_prompt_tokens),
        ("outrider_completion_tokens_total", "vllm:generation_tokens_total", 10),
        ("outrider_prefix_cache_queries_total", "vllm:prefix_cache_queries_total", 2 * num_prompt_tokens),
        ("outrider_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", 64),
        ("outrider_drafts_verified_total", "vllm:spec_decode_num_drafts_total", 4),
        ("outrider_inter_token_seconds_count", "vllm:inter_token_latency_seconds_count", 4),
        ("outrider_ttft_seconds_count", "vllm:time_to_first_token_seconds_count", 2),
        ("outrider_e2e_seconds_count", "vllm:e2e_request_latency_seconds_count", 2),
        ("outrider_prefill_seconds_sum", "vllm:request_prefill_time_seconds_sum", 0.5),
        ("outrider_choice_queue_seconds_count", "vllm:request_queue_time_seconds_count", 2),
        ("outrider_decode_seconds_count", "vllm:request_decode_time_seconds_count", 2),
        ("outrider_choice_completion_tokens_sum", "vllm:request_generation_tokens_sum", 10),
    ):
        assert value(series, name) == value(series, vllm, **model) == expected, name
    verified = [value(series, "outrider_draft_tokens_verified_total", position=str(i)) for i in range(4)]
    accepted = [value(series, "outrider_draft_tokens_accepted_total", position=str(i)) for i in range(4)]
    assert (verified, accepted) == ([4, 4, 2, 2], [2, 2, 0, 0])
    assert value(series, "vllm:spec_decode_num_draft_tokens_total", **model) == 12
    assert value(series, "vllm:spec_decode_num_accepted_tokens_total", **model) == 4
    assert value(series, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1", **model) == 2
    assert value(series, "outrider_prediction_tokens_rejected_total", drafter="ngram") == 4
    assert value(series, "outrider_prediction_tokens_rejected_total", drafter="small") == 4


async def test_choices_are_counted_by_the_reason_of_their_end() -> None:
    def script(request: Request) -> list[Step]:
        steps = list(finishing(request, token_ids("the answer")))
        if request.sampling.seed == 1:
            return [Commit(request.id, 0, (), finish=FinishReason.ERROR, error="no number")]
        return steps if request.sampling.seed == 0 else [steps[0], LinkClosed("the target went")]

    async with serving(script) as (http, _):
        for fields in ({"seed": 0}, {"seed": 0, "max_tokens": 2}, {"seed": 1}, {"seed": 2}):
            await http.post(CHAT, json=chat_body(**fields))
        series = parsed((await http.get("/metrics")).text)
    for reason in ("stop", "length", "error", "abort"):
        assert value(series, "outrider_choices_finished_total", finished_reason=reason) == 1
        assert value(series, "vllm:request_success_total", finished_reason=reason, model_name="scripted") == 1
    assert value(series, "outrider_e2e_seconds_count") == 2  # of those that finished


async def test_tokens_are_counted_as_they_come() -> None:
    """A rate over a long stream is not zero until its end."""
    metrics = Metrics(600.0)
    metrics.on_tokens(Commit("r", 5, (1, 2, 3)), 3, None)
    metrics.on_tokens(Commit("r", 8, (1,)), 1, 0.02)
    series = parsed(metrics.render(None).decode())
    assert value(series, "outrider_completion_tokens_total") == 4
    assert value(series, "outrider_inter_token_seconds_sum") == 0.02


@pytest.mark.parametrize(("deadline_s", "bounds"), [(600, {600, 1200}), (7200, {600, 1200, 7200})])
async def test_histograms_of_times_reach_the_deadline(deadline_s: int, bounds: set[float]) -> None:
    async with serving(request_timeout_s=float(deadline_s)) as (http, _):
        series = parsed((await http.get("/metrics")).text)
    found: dict[str, set[float]] = {}
    for name, labels in series:
        if name.endswith("_bucket"):
            found.setdefault(name, set()).add(float(dict(labels)["le"]))
    assert {bound for bound in found["outrider_e2e_seconds_bucket"] if 600 <= bound < math.inf} == bounds
    assert max(bound for bound in found["outrider_tpot_seconds_bucket"] if bound < math.inf) == deadline_s
    assert max(bound for bound in found["outrider_choice_max_tokens_bucket"] if bound < math.inf) == 1e5


def test_targets_are_summed_up_under_vllm_s_names() -> None:
    first = TargetStatus("target-0", "ready", 3, 1, 100, 40, 10.0, 20.0, num_preempted=5)
    second = TargetStatus("target-1", "ready", 2, 0, 100, 80, 10.0, 20.0, num_preempted=1)
    series = parsed(Metrics(600.0).render(ClusterStatus("m", "fixed", 7, (first, second), ())).decode())
    assert value(series, "outrider_target_kv_usage_ratio", target="target-0") == pytest.approx(0.6)
    assert value(series, "outrider_target_preemptions_total", target="target-0") == 5
    for name, expected in (
        ("vllm:num_requests_running", 5),
        ("vllm:num_requests_waiting", 1),
        ("vllm:num_preemptions_total", 6),
        ("vllm:kv_cache_usage_perc", 0.4),
    ):
        assert value(series, name, model_name="m") == pytest.approx(expected)


async def test_every_series_of_vllm_s_dashboards_is_there() -> None:
    async with serving(drafting, status_ttl_s=1e-6) as (http, cluster):
        await http.post(CHAT, json=chat_body(max_tokens=9))
        text = (await http.get("/metrics")).text
        assert {name for name, _ in parsed(text)} >= VLLM_SERIES
        cluster.failure = LinkClosed("nobody answers")  # what this process counts goes on
        gone = parsed((await http.get("/metrics")).text)
    assert value(gone, "vllm:generation_tokens_total", model_name="scripted") == 5
    assert ("vllm:num_requests_running", frozenset({("model_name", "scripted")})) not in gone


async def test_names_help_and_buckets_follow_prometheus_rules() -> None:
    async with serving(drafting) as (http, _):
        await http.post(CHAT, json=chat_body(max_tokens=9))
        lines = (await http.get("/metrics")).text.splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    for line in lines:
        if line.startswith("# HELP"):
            name, text = line.split(maxsplit=3)[2:]
            assert re.fullmatch(r"(\d|[A-Z]).*\.", text), line
        elif not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            assert name.endswith("_total") == (kinds.get(name) == "counter"), line
            assert not name.endswith("_created"), line
    assert "gauge" in kinds.values()
    for row in METRICS:
        if row.kind == "histogram" and row.read is None and row.name.endswith("_seconds"):
            assert max(row.buckets) >= 600


def test_what_targets_count_of_drafters_is_exported_by_drafter_and_position() -> None:
    tally = DraftingTally()
    for num_verified, num_accepted in ((3, 3), (3, 1), (1, 0)):
        tally.verified[num_verified] += 1
        tally.accepted[num_accepted] += 1
    tally.drafted[5] += 1
    for hold_s in (0.0002, 0.004, 30.0):
        tally.hold_s.note(hold_s)
    tally.outcomes = OutcomeReport(10, 4, 3, 20)
    here, there = tally.counts(4, 1, 2, 0.75), tally.counts(0, 0, 0, None)
    drafter = DrafterStatus("small", "model", "ready", 0, 7, 4, None, counts=merged([here, there]), num_cpus=2.0)
    rounds = Histogram((0.01, 0.1))
    rounds.note(0.01)
    rounds.note(0.5)
    target = TargetStatus("target-0", "ready", 0, 0, 9, 9, 0.0, 1.0, rounds_s=rounds.snapshot(), num_gpus=4.0)
    series = parsed(Metrics(600.0).render(ClusterStatus("m", "fixed", 1, (target,), (drafter,))).decode())
    small = {"drafter": "small"}
    for name, expected in (("position_verified", [6, 4, 4]), ("position_accepted", [4, 2, 2])):
        found = [value(series, f"outrider_drafter_{name}_total", position=str(i), **small) for i in range(3)]
        assert found == expected
        assert ("outrider_drafter_" + name + "_total", frozenset({**small, "position": "3"}.items())) not in series
    for name, num, total in (("drafted", 2, 10), ("verified", 6, 14), ("accepted", 6, 8)):
        assert value(series, f"outrider_drafter_{name}_length_count", **small) == num
        assert value(series, f"outrider_drafter_{name}_length_sum", **small) == total
        assert value(series, f"outrider_drafter_{name}_length_bucket", le="64.0", **small) == num
    assert value(series, "outrider_drafter_accepted_length_bucket", le="0.0", **small) == 2
    assert value(series, "outrider_drafter_accepted_length_bucket", le="1.0", **small) == 4
    assert value(series, "outrider_drafter_hold_seconds_bucket", le="0.005", **small) == 4
    assert value(series, "outrider_drafter_hold_seconds_bucket", le="+Inf", **small) == 6
    assert value(series, "outrider_drafter_hold_seconds_sum", **small) == pytest.approx(60.0084)
    assert value(series, "outrider_drafter_acceptance_ratio", **small) == 0.75
    assert value(series, "outrider_drafter_stale_total", **small) == 4
    for outcome, num in (("own", 8), ("hit", 6), ("missed", 6)):
        assert value(series, "outrider_drafter_outcomes_total", outcome=outcome, **small) == num
    assert value(series, "outrider_drafter_outcomes_prepared_total", **small) == 40
    assert value(series, "outrider_target_round_seconds_bucket", le="0.01", target="target-0") == 1
    assert value(series, "outrider_target_round_seconds_count", target="target-0") == 2
    assert value(series, "outrider_reserved_resources", role="target", process="target-0", resource="gpu") == 4
    assert value(series, "outrider_reserved_resources", role="drafter", process="small", resource="cpu") == 2


def test_histograms_of_other_bounds_are_not_added() -> None:
    with pytest.raises(ValueError, match="cannot be added"):
        Histogram((1.0,)).snapshot().plus(Histogram((2.0,)).snapshot())


async def test_acceptance_is_counted_by_domain() -> None:
    async with serving(drafting) as (http, _):
        await http.post(CHAT, json=chat_body(max_tokens=9))
        await http.post(CHAT, json=chat_body(max_tokens=9, metadata={"domain": "code"}))
        await http.post(CHAT, json=chat_body(max_tokens=9, metadata={"domain": 'no "name"'}))
        await http.post("/v1/responses", json={"model": "scripted", "input": "it?", "metadata": {"domain": "sql"}})
        await http.post("/v1/completions", json={"model": "scripted", "prompt": "the", "max_tokens": 9})
        series = parsed((await http.get("/metrics")).text)
    for domain, num_calls in (("chat", 2), ("code", 1), ("sql", 1), ("text", 1)):
        for drafter, num_verified, num_accepted in (("ngram", 4, 2), ("small", 2, 0)):
            labels = {"drafter": drafter, "domain": domain}
            assert value(series, "outrider_domain_tokens_verified_total", **labels) == num_calls * num_verified
            assert value(series, "outrider_domain_tokens_accepted_total", **labels) == num_calls * num_accepted


def test_clients_cannot_make_any_number_of_series() -> None:
    metrics, counts = Metrics(600.0), DraftingCounts()
    counts.record(Commit("r", 5, (1, 2), 4, 1, "ngram"), 2)
    for i in range(3 * MAX_DOMAINS):
        metrics.record_drafts(f"d{i}", Adapter(f"d{i}", "", ""), counts)
    series = parsed(metrics.render(None).decode())
    for kind in ("domain", "adapter"):
        labels = {dict(labels)[kind] for name, labels in series if name == f"outrider_{kind}_tokens_verified_total"}
        assert labels == {"other", *(f"d{i}" for i in range(MAX_DOMAINS))}


def test_the_page_lists_every_metric() -> None:
    same = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text() == page()
    assert same, "run: outrider metrics list >docs/metrics.md"


def test_changes_of_replicas_are_counted_by_direction() -> None:
    status = ClusterStatus("m", "fixed", 1, (), (), scale_counts=(ScaleCounts("target", 3, 2), ScaleCounts("ngram", 1)))
    series = parsed(Metrics(600.0).render(status).decode())
    for name, direction, num in (("target", "up", 3), ("target", "down", 2), ("ngram", "up", 1), ("ngram", "down", 0)):
        assert value(series, "outrider_scale_events_total", replicas_of=name, direction=direction) == num
