"""The dashboard's files and data. Its page is tested in a browser (tests/browser)."""

import asyncio
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.client import ClusterStatus, DrafterStatus, DraftingEffect, TargetStatus
from cluster.counts import SloCounts
from cluster.errors import LinkClosed
from cluster.types import Commit, FinishReason, Prefill
from deploy.api.choice import Choice, OutputOptions
from deploy.api.dashboard import History, Timelines
from deploy.api.dashboard.history import MAX_REQUESTS, MAX_ROUNDS, MAX_SAMPLES, MAX_SENT_ROUNDS, RATIO, AnswerCounts
from deploy.api.dashboard.pages import PAGE, page_paths
from tests.support.api import app_of, chat_body, listening, model_info, saying, serving, tokenizer
from tests.support.requests import a_request
from tests.support.scripted import ScriptedClient

CHAT = "/v1/chat/completions"
DATA = "/v1/outrider/dashboard"
FORBIDDEN = re.compile(r"https?://(?!www\.w3\.org/)|innerHTML|outerHTML|insertAdjacentHTML|\beval\(| style=|\son\w+=")


async def test_the_page_and_its_files_are_served_under_a_strict_policy() -> None:
    async with serving() as (http, _):
        for path, file in page_paths().items():
            response = await http.get(path)
            assert (response.status_code, response.content) == (200, file.read_bytes())
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            again = await http.get(path, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await http.get(f"{PAGE}/nothing.js")).status_code == 404
        assert (await http.get(f"{PAGE}/../app.py")).status_code == 404


def test_the_page_names_all_of_its_files_and_nothing_elsewhere() -> None:
    texts = {path: file.read_text("utf-8") for path, file in page_paths().items()}
    named = re.findall(r'(?:href|src)="(dashboard/[^"]+)"', texts[PAGE])
    imported = [name for text in texts.values() for name in re.findall(r'from "\./([\w.]+)"', text)]
    assert {f"/{name}" for name in named} | {f"{PAGE}/{name}" for name in imported} == set(texts) - {PAGE}
    for path, text in texts.items():
        assert not FORBIDDEN.findall(text), path
        assert text.count("\n") <= 400, path


async def test_data_need_the_key_and_the_page_does_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    async with serving(api_keys_file=keys) as (http, _):
        assert (await http.get(PAGE)).status_code == 200
        assert (await http.get(DATA)).status_code == 401
        assert (await http.get(DATA, headers={"authorization": "Bearer sk-right"})).status_code == 200


async def test_a_request_is_shown_by_counts_and_never_by_text() -> None:
    async with serving(saying("the answer is forty-two", num_per_round=3)) as (http, _):
        answer = await http.post(CHAT, json=chat_body(temperature=0))
        data = (await http.get(DATA)).json()
    assert [one["state"] for one in data["requests"]] == ["complete"]
    request = data["requests"][0]
    assert answer.json()["id"].endswith(request["label"])
    num_tokens = answer.json()["usage"]["completion_tokens"]
    assert request["num_tokens"] == sum(one[4] for one in data["rounds"]) == num_tokens
    assert [one[3] for one in data["rounds"]] == list(range(0, num_tokens, 3)), "each round tells where it begins"
    acceptance = answer.json()["outrider"]["acceptance"]
    assert request["num_proposed"] == acceptance["num_proposed"]
    assert sum(count * length for length, _, count in data["drafts"]["ngram"]) == acceptance["num_proposed"]
    for word in ("what is it", "answer is", "forty"):
        assert word not in str(data)


async def test_only_what_is_new_is_sent() -> None:
    async with serving() as (http, _):
        await http.post(CHAT, json=chat_body())
        first = (await http.get(DATA)).json()
        query = {"after": [f"{'0' * 16}.{10**6}.{10**6}", f"{first['epoch']}.{first['version']}.{10**6}"]}
        second = (await http.get(DATA, params=query)).json()
        assert (second["requests"], second["rounds"], second["samples"]) == ([], [], [])
        await http.post(CHAT, json=chat_body())
        third = (await http.get(DATA, params=query)).json()
        assert [one["number"] for one in third["requests"]] == [2]
        of_another_process = {"after": query["after"][:1]}
        assert len((await http.get(DATA, params=of_another_process)).json()["requests"]) == 2


MERGED = """
import { Store } from "./store.js";
const seconds = performance.now() / 1000;
const answer = (epoch, number, sample, clock) => ({
  epoch, num_replicas: 2, version: 10 + number, now_s: seconds + clock, interval_s: 2, status: null, num_queued: 1,
  requests: [{ number, arrived_s: seconds + clock - number, ended_s: null, num_tokens: 3 }],
  rounds: [[1, number, seconds + clock, 0, 3, 2, 2, "ngram"]],
  drafts: { ngram: [[2, 2, number]] },
  samples: [{ number: sample, at_s: seconds + clock - sample }],
});
const store = new Store();
const seen = [];
const see = () => seen.push({
  query: store.query, numQueued: store.numQueued, drafts: store.drafts.ngram,
  samples: store.samples.map((one) => one.number),
  requests: store.listedRequests(9).map((one) => [one.epoch, one.number, one.rounds.length, one.ended_s]),
});
for (const one of [answer("a", 2, 5, 1000), answer("b", 1, 9, -1000), answer("a", 2, 6, 1000), answer("c", 3, 1, 0)]) {
  store.apply(one);
  see();
}
console.log(JSON.stringify(seen));
"""


def _ran(script: str) -> Any:
    """What a module prints that uses the page's own."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    module = script.replace("./store.js", page_paths()[f"{PAGE}/store.js"].as_uri())
    ran = subprocess.run([node, "--input-type=module", "--eval", module], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_page_merges_what_replicas_of_the_api_answer() -> None:
    """Their clocks differ. A third one is the successor of the one that has not answered for the longest time."""
    one, both, again, replaced = _ran(MERGED)
    assert (one["query"], one["requests"]) == ("after=a.12.5", [["a", 2, 1, None]])
    assert (both["query"], both["numQueued"]) == ("after=a.12.5&after=b.11.9", 2)
    assert both["requests"] == [["b", 1, 1, None], ["a", 2, 1, None]], "the newest first, by one clock"
    assert (both["drafts"], both["samples"]) == ([[2, 2, 2], [2, 2, 1]], [9])
    assert again["requests"] == [["b", 1, 1, None], ["a", 2, 2, None]]
    assert again["samples"] == [9], "of the replica with the longest history"
    assert (replaced["query"], replaced["samples"]) == ("after=a.12.6&after=c.13.1", [5, 6])
    assert replaced["requests"] == [["a", 2, 2, None], ["c", 3, 1, None]]


@pytest.mark.parametrize("wrong", ["1", f"{'0' * 16}.1", *(f"{'0' * 16}.1.{n}" for n in ("-1", "1e3", "9" * 40, "١", ""))])
async def test_a_wrong_version_is_a_400(wrong: str) -> None:
    async with serving() as (http, _):
        response = await http.get(DATA, params={"after": wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "after")


async def test_a_cluster_that_does_not_answer_is_told() -> None:
    async with serving() as (http, cluster):
        await http.post(CHAT, json=chat_body())
        cluster.failure = LinkClosed("the supervisor is away")
        await asyncio.sleep(0)
    async with serving(status_ttl_s=1e-6) as (http, cluster):
        cluster.failure = LinkClosed("the supervisor is away")
        data = (await http.get(DATA)).json()
    assert data["status"] is None
    assert "the supervisor is away" in data["fault"]


def test_samples_are_taken_while_the_app_runs() -> None:
    client = ScriptedClient(model_info(), saying("the answer"))
    with listening(app_of(client)) as url, httpx.Client(base_url=url, trust_env=False) as http:
        samples: list[dict[str, object]] = []
        while not samples:
            samples = http.get(DATA).json()["samples"]
    assert samples[0]["num_ready_targets"] == samples[0]["num_targets"] == 1


async def _unused() -> ClusterStatus:
    raise AssertionError


def test_a_sample_sums_over_targets_and_drafters() -> None:
    slo = (SloCounts("interactive", num_answers=4, num_met=3, num_refused=1),)
    effect = DraftingEffect(decode_s=2.0, plain_s=3.0, rejected_s=0.5)
    target = TargetStatus("target-0", "ready", 3, 1, 100, 75, 50.0, 10.0, slo=slo, drafting=effect)
    drafters = (DrafterStatus("a", "ngram", "ready", 2, 30, 20, 1.0), DrafterStatus("b", "suffix", "down", 0, 10, 1, None))
    status = ClusterStatus("m", "hedge", 1, (target, replace(target, name="target-1", state="down")), drafters)

    history = History(_unused, lambda: 7)
    for i in range(MAX_SAMPLES + 5):
        history.take(status, float(i))
    samples = history.samples(after=0)
    assert len(samples) == MAX_SAMPLES
    sample = samples[-1]
    states = {"num_running": 6, "num_waiting": 2, "num_queued": 7, "num_ready_targets": 1, "num_ready_drafters": 1}
    counts = {"num_proposed": 40, "num_accepted": 21, "kv_usage": 0.25, "slo": {"interactive": (8, 6, 2)}}
    assert {name: sample[name] for name in states | counts} == states | counts
    assert sample["plain_s"] / sample["decode_s"] == 1.5
    assert history.samples(after=sample["number"] - 1) == [sample]


def test_answers_are_counted_between_samples() -> None:
    """Their times within the width of a bucket, how they ended, and what of their prompts was cached; each answer once."""
    history = History(_unused, lambda: 0)
    ends: list[tuple[FinishReason | None, float | None, bool]] = [
        (FinishReason.STOP, 102.0, False),
        (FinishReason.LENGTH, 102.0, False),
        (None, 102.0, True),  # failed
        (None, 102.0, False),  # cut off
        (None, None, False),  # refused before its first token
    ]
    for finish, first_s, failed in ends:
        choice = Choice(0, a_request("a", (1,), max_tokens=8, arrival_s=100.0), tokenizer(), model_info(), OutputOptions())
        choice.first_token_s, choice.last_token_s, choice.num_tokens = first_s, first_s and first_s + 1.5, 4
        choice.finish, choice.failed = finish, failed
        history.answers.end(choice)
    history.answers.note(Commit("a", 100, (5,), prefill=Prefill(60, 0.1, 0.2)))
    history.answers.note(Commit("a", 101, (5,)))
    for _ in range(2):
        history.take(ClusterStatus("m", "hedge", 1, (), ()), 0.0)
    counts, after = (AnswerCounts(**sample["answers"]) for sample in history.samples(0))
    assert (counts.num_complete, counts.num_failed, counts.num_aborted) == (2, 1, 1)
    assert (counts.num_prompt_tokens, counts.num_cached_tokens) == (100, 60)
    for times, number, seconds in ((counts.ttft, 4, 2.0), (counts.tpot, 4, 0.5), (counts.e2e, 2, 3.5)):
        ((bucket, counted),) = times.items()
        assert counted == number
        assert RATIO**bucket <= seconds < RATIO ** (bucket + 1)
    assert after == AnswerCounts()


FIGURES = """
import { percentile, Store } from "./store.js";
const now = Date.now() / 1000;
const zeros = { tpot: {}, e2e: {}, num_complete: 0, num_failed: 0, num_aborted: 0 };
const none = { ...zeros, num_prompt_tokens: 100, num_cached_tokens: 0 };
const answers = (ttft, more) => ({ ttft, ...none, ...more });
const answer = (epoch, samples) => ({
  epoch, num_replicas: 2, version: 1, now_s: now, interval_s: 2, status: null, num_queued: 0,
  requests: [], rounds: [], drafts: {},
  samples: samples.map((one, i) => ({ number: i + 1, at_s: now - 2 * (samples.length - i), answers: one })),
});
const store = new Store();
const failed = answers({}, { num_failed: 2 }), cached = answers({ "-10": 98 }, { num_cached_tokens: 60 });
store.apply(answer("a", [answers({ 5: 1 }), failed, cached]));
store.apply(answer("b", [answers({ 30: 1 })]));
const all = store.answers(60);
console.log(JSON.stringify({
  all, recent: store.answers(3).ttft,
  p50: percentile(all.ttft, 0.5), p99: percentile(all.ttft, 0.99), most: percentile(all.ttft, 1), none: percentile({}, 0.5),
  series: store.answerSeries((one) => one.num_failed, 2).map(([, value]) => value),
}));
"""


def test_the_page_merges_times_of_answers() -> None:
    """Percentiles are those of all replicas together, and a series sums over the samples up to each point."""
    found = _ran(FIGURES)
    assert found["all"]["ttft"] == {"5": 1, "-10": 98, "30": 1}
    assert (found["all"]["num_failed"], found["all"]["num_prompt_tokens"], found["all"]["num_cached_tokens"]) == (2, 400, 60)
    assert found["recent"] == {"-10": 98, "30": 1}
    bounds = [RATIO ** (bucket + 0.5) for bucket in (-10, 5, 30)]
    assert [found["p50"], found["p99"], found["most"]] == pytest.approx(bounds)
    assert found["none"] is None
    assert found["series"] == [0, 2, 2]


def test_timelines_are_bounded() -> None:
    timelines = Timelines(clock=lambda: 0.0)
    for i in range(MAX_REQUESTS + 9):
        timelines.begin(a_request(f"chatcmpl-abcdef-{i}", (1,), max_tokens=8))
    for i in range(MAX_ROUNDS + 9):
        timelines.note(Commit("chatcmpl-abcdef-0", 1 + i, (5,), 1, 1, f"drafter-{i}"), 1)
    timelines.note(Commit("unknown", 1, (5,)), 1)
    assert len(timelines.requests(0)) == MAX_REQUESTS
    assert len(timelines.rounds(0)) == MAX_SENT_ROUNDS
    assert timelines.rounds(0)[-1].version == timelines.version
    assert len(timelines.drafts()) <= 128
