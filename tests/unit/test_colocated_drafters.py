"""Drafters in the target's process: linked like any other, on threads of their own, and never a reason for another token."""

import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.target import TargetActor
from benchmarks.core_sets import usable_cores
from benchmarks.embedded import Completion, EmbeddedCluster, PoolEntry
from cluster.config import CascadeOptions, Config, DrafterConfig, DSparkOptions, ModelConfig, NgramOptions, TargetConfig
from cluster.errors import IncompatibleTokenizer, InvalidField, ModelUnavailable
from cluster.inventory import Inventory, Node
from cluster.placement import place
from cluster.resolve import resolve
from cluster.sampling_params import SamplingParams
from cluster.types import FinishReason, ModelInfo, Request
from drafters.dspark.host import Host, HostFeatures, make_dspark
from drafters.protocol import Capabilities, Demand, Draft
from drafters.registry import feature_layers, make_drafter
from engine.factory import load_target
from engine.models.tokenizer import fingerprint
from engine.native import NativeTarget
from engine.target import SpanInput, SpanOutcome
from router.assignment import member_name
from router.cost_model import TableCost
from router.draft_length import DecodeRate
from router.planner import PlannerSettings, StepPlanner
from tests.support.dspark import write_dspark
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import eventually

NODES = Inventory((Node("here", 4.0),))
COST = TableCost((1, 32), (0.02, 0.03))
PRECIOUS = TableCost((1,), (6000.0,))
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_layers=3, hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return write_dspark(tmp_path_factory.mktemp("tiny") / "drafter", target, anchor_input=True, anchor_input_rank=4)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A drafter that reads other layers."""
    folder = tmp_path_factory.mktemp("tiny") / "other"
    return write_dspark(folder, target, seed=4, target_layer_ids=[-1, 1], markov_head_type="rnn")


def options(folder: Path) -> DSparkOptions:
    return DSparkOptions(path=str(folder), dtype="float32", kv_cache_gb=0.01, min_survival=0.0)


def config(target: Path, drafters: Sequence[DrafterConfig], **engine: Any) -> Config:
    engine = {"dtype": "float32", "kv_cache_gb": 0.05, "device": "cpu"} | engine
    return Config(
        model=ModelConfig(name=str(target), max_model_len=256), target=TargetConfig(**engine), drafters=tuple(drafters)
    )


def requests(num: int, max_tokens: int = 40) -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple((7 * i + 11 * t) % 250 for t in range(20 + 9 * i)),
            SamplingParams(max_tokens=max_tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True),
            arrival_s=float(i),
        )
        for i in range(num)
    ]


def outputs(completions: Sequence[Completion]) -> list[list[int]]:
    assert all(c.commits[-1].finish is FinishReason.LENGTH for c in completions)
    return [c.token_ids for c in completions]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with EmbeddedCluster.of(resolve(config(target, ()), NODES)) as cluster:
        return outputs(cluster.complete(requests(6)))


def test_two_companions_and_one_in_a_cascade_leave_the_tokens_as_they_are(
    target: Path, folder: Path, other: Path, plain: list[list[int]]
) -> None:
    """They read different layers of the same pass."""
    pool = (
        DrafterConfig(name="dspark", options=options(folder), max_draft_len=6),
        DrafterConfig(name="rnn", options=options(other), max_draft_len=4, ahead_len=2),
        DrafterConfig(name="cascade", options=CascadeOptions(members=(NgramOptions(), options(other)), costs=(0.0, 0.0))),
    )
    resolved = resolve(config(target, pool), NODES).model_copy(update={"planner": config(target, ()).planner})
    with EmbeddedCluster.of(resolved) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
        for name in ("dspark", "rnn", "cascade"):
            assert cluster.loop.telemetry.drafter(name).reply_s is not None


def engine_of(target: Path, layers: tuple[int, ...], num_blocks: int = 64) -> tuple[NativeTarget, ModelInfo]:
    per_block = 32 * 2 * 3 * 32 * 4
    engine = load_target(
        target, dtype="float32", kv_cache_bytes=num_blocks * per_block, max_model_len=256, feature_layers=layers
    )
    return engine, ModelInfo("tiny", 257, 256, (256,), fingerprint(target))


PATIENT = PlannerSettings(verification="all", max_hold_s=60.0, max_chunk_len=24)  # with PRECIOUS, all drafts are awaited


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_drafts_are_verified_also_when_sequences_are_preempted(
    target: Path, folder: Path, plain: list[list[int]], num_blocks: int
) -> None:
    """Nine blocks hold two or three of the six sequences, in chunks of 24: features come and go."""
    engine, model = engine_of(target, (0, 2), num_blocks)
    drafter = make_dspark(options(folder), model, Host(engine, target))
    pool = {"dspark": PoolEntry(drafter, max_draft_len=6, companion=True)}
    with EmbeddedCluster(engine, model, PRECIOUS, pool, StepPlanner(PATIENT)) as cluster:
        completions = cluster.complete(requests(6))
        assert outputs(completions) == plain
        assert sum(completion.num_proposed for completion in completions) > 20
        assert bool(cluster.loop.telemetry.num_preempted) == (num_blocks == 9)
    engine.check_integrity()
    drafter.check_integrity()


def test_a_drafter_whose_link_was_killed_follows_again(target: Path, folder: Path, plain: list[list[int]]) -> None:
    """A killed link is found again; what was followed is opened anew."""
    engine, model = engine_of(target, (0, 2))
    drafter = make_dspark(options(folder), model, Host(engine, target))
    with EmbeddedCluster(engine, model, COST, {"dspark": PoolEntry(drafter, companion=True)}) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
        cluster.kill_drafter("dspark")
        assert outputs(cluster.complete(requests(6))) == plain
        before = cluster.loop.telemetry.drafter("dspark").num_proposed
        cluster.start_drafter("dspark", PoolEntry(drafter, companion=True))
        completions = cluster.complete(requests(6))
        assert outputs(completions) == plain
        assert cluster.loop.telemetry.drafter("dspark").num_proposed >= before


class _Wrong:
    """Drafts what the target never says."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.num_asked = 0
        self.lengths: dict[str, int] = {}

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.lengths[request_id] = len(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.lengths[request_id] += len(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.num_asked += 1
        return [Draft(demand.request_id, (0,) * demand.num_tokens, (0.5,) * demand.num_tokens) for demand in demands]

    def release(self, request_id: str) -> None:
        self.lengths.pop(request_id, None)

    def check_integrity(self) -> None: ...


def test_one_whose_gain_is_below_its_time_is_hardly_queried_and_catches_up_later(
    target: Path, plain: list[list[int]]
) -> None:
    engine, model = engine_of(target, (0, 2))
    drafter = _Wrong()
    with EmbeddedCluster(engine, model, COST, {"wrong": PoolEntry(drafter, companion=True)}) as cluster:
        for _ in range(3):
            assert outputs(cluster.complete(requests(6))) == plain
        num_rounds = cluster.loop.telemetry.num_passes
        eventually(lambda: not drafter.lengths)  # what has ended is forgotten
    assert 0 < drafter.num_asked < num_rounds / 2


def test_one_that_nobody_was_with_is_queried_at_once_for_its_first_request(target: Path, plain: list[list[int]]) -> None:
    """Rounds of requests without it do not count as its trials."""
    engine, model = engine_of(target, (0, 2))
    drafter = _Wrong()
    with EmbeddedCluster(engine, model, COST, {"wrong": PoolEntry(drafter, companion=True)}) as cluster:
        for _ in range(2):
            cluster.complete([replace(request, chain=()) for request in requests(6)])
        assert not drafter.num_asked
        num_rounds = cluster.loop.telemetry.num_passes
        assert outputs(cluster.complete(requests(6, 12))) == [tokens[:12] for tokens in plain]
        num_rounds = cluster.loop.telemetry.num_passes - num_rounds
    assert drafter.num_asked >= num_rounds / 2


def test_a_row_has_its_price_also_where_prompts_come_in_nearly_every_pass(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of each round that decodes are noted, whatever of prompts is in it."""
    engine, model = engine_of(target, (0, 2))
    decoded: list[int] = []
    execute, note = engine.execute, DecodeRate.note
    noted: list[int] = []

    def executed(spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        outcomes = execute(spans)
        decoding = {span.request_id for span in spans if span.samples and len(span.token_ids) == 1 + span.num_drafts}
        decoded.append(sum(len(outcome.token_ids) for outcome in outcomes if outcome.request_id in decoding))
        return outcomes

    def noting(
        rate: DecodeRate, began_s: float, num_tokens: int, prompts_s: float, num_requests: int, plain_s: float
    ) -> None:
        if num_tokens:
            noted.append(num_tokens)
        note(rate, began_s, num_tokens, prompts_s, num_requests, plain_s)

    monkeypatch.setattr(engine, "execute", executed)
    monkeypatch.setattr(DecodeRate, "note", noting)
    planner = StepPlanner(PlannerSettings(max_chunk_len=8))
    with EmbeddedCluster(engine, model, COST, {"wrong": PoolEntry(_Wrong(), companion=True)}, planner) as cluster:
        cluster.complete(requests(6))
    told = [num for num in decoded if num]
    assert len(told) < len(decoded)
    rest = iter(told)
    assert all(any(num == other for other in rest) for num in noted), "each is a round's own, in their order"
    assert len(noted) > len(told) / 2


class _DuringPasses(_Wrong):
    """Drafts only while a pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.pass_runs, self.has_drafted = threading.Event(), threading.Event()

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        if self.pass_runs.wait(DEADLINE_S):
            self.has_drafted.set()
        return super().propose(demands)


def test_a_companion_with_a_partition_drafts_while_a_pass_runs(
    target: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = engine_of(target, ())
    drafter, execute, num_passes = _DuringPasses(), engine.execute, itertools.count()

    def executed(spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        drafter.pass_runs.set()
        if next(num_passes) == 3:  # drafts have been asked for since the first
            assert drafter.has_drafted.wait(DEADLINE_S)
        outcomes = execute(spans)
        drafter.pass_runs.clear()
        return outcomes

    monkeypatch.setattr(engine, "execute", executed)
    planner = StepPlanner(PlannerSettings(max_hold_s=0.0))
    pool, partitions = {"slow": PoolEntry(drafter, companion=True)}, {"slow": usable_cores()}
    with EmbeddedCluster(engine, model, COST, pool, planner, partitions=partitions) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain


class _Failing:
    """Drafts once, then fails."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.num_asked = 0

    def open(self, *_: object) -> None: ...

    def extend(self, *_: object) -> None: ...

    def release(self, *_: object) -> None: ...

    def check_integrity(self) -> None: ...

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked > 3:
            raise FloatingPointError("the drafter is broken")
        return [Draft(demand.request_id, (1,), (0.5,)) for demand in demands]


def test_a_companion_that_fails_is_left_out_and_the_target_serves_on(
    target: Path, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine, model = engine_of(target, ())
    failing = _Failing()
    with EmbeddedCluster(engine, model, COST, {"broken": PoolEntry(failing, companion=True)}) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
        assert failing.num_asked == 4
        eventually(lambda: cluster.loop.status().followed == ())
    assert "drafter broken failed" in caplog.text


def test_a_target_process_brings_its_companions(target: Path, folder: Path) -> None:
    pool = (DrafterConfig(name="dspark", options=options(folder)), DrafterConfig(name="ngram", options=NgramOptions()))
    resolved = resolve(config(target, pool), NODES)
    actor = TargetActor(resolved, "target-0", "memory://a-target", "secret")
    try:
        info = actor.start()
        assert info.address == "memory://a-target"
        eventually(lambda: actor.slot_report().drafters == (member_name("dspark", 0),))
    finally:
        actor.stop()


def test_placed_with_the_target(target: Path, folder: Path) -> None:
    pool = (
        DrafterConfig(name="dspark", options=options(folder)),
        DrafterConfig(name="cascade", options=CascadeOptions(members=(NgramOptions(), options(folder)))),
        DrafterConfig(name="ngram", options=NgramOptions()),
    )
    resolved = resolve(config(target, pool), NODES)
    assert resolve(resolved, NODES) == resolved
    assert [drafter.is_colocated for drafter in resolved.drafters] == [True, True, False]
    assert [group.name for group in place(resolved, NODES).groups] == ["target-0", "drafter-ngram"]
    with pytest.raises(ValueError, match="replicas must be 1 for a drafter in the target's process"):
        DrafterConfig(name="dspark", options=options(folder), replicas=2)


def test_features_of_other_layers_are_picked_out(target: Path, folder: Path, other: Path) -> None:
    drafters = [DrafterConfig(name=f"d{i}", options=options(path)) for i, path in enumerate((folder, other))]
    assert feature_layers(drafters) == (-1, 0, 1, 2)
    engine, _ = engine_of(target, (-1, 0, 1, 2))
    prompt = tuple(range(30))
    request = Request("r", prompt, SamplingParams(max_tokens=3), 0.0)
    engine.open(request, prompt)
    engine.execute([SpanInput("r", 0, prompt)])
    whole = engine.read_hidden_states("r", 0, 30)
    picked = HostFeatures(engine, (0, 2)).read_hidden_states("3/r", 4, 9)
    assert picked.equal(whole[4:9].view(5, 4, 64)[:, [1, 3]].flatten(1))
    with pytest.raises(InvalidField, match=r"must hold \[2\]"):
        HostFeatures(engine_of(target, (0,))[0], (0, 2))


def test_what_does_not_fit_the_target_is_refused(target: Path, folder: Path, tmp_path: Path) -> None:
    engine, model = engine_of(target, (0, 2))
    host = Host(engine, target)
    with pytest.raises(InvalidField, match="must run in the target's process"):
        make_drafter(DrafterConfig(name="d", options=options(folder)), model)
    with pytest.raises(ModelUnavailable, match="no folder of a trained drafter"):
        make_dspark(options(tmp_path / "nowhere"), model, host)
    deeper = write_dspark(tmp_path / "deeper", target, num_target_layers=4)
    with pytest.raises(ModelUnavailable, match=r"made for a target of 4 layers.* has 3"):
        make_dspark(options(deeper), model, host)
    foreign = write_dspark(tmp_path / "foreign", target, tokenizer_fingerprint="0" * 64)
    with pytest.raises(IncompatibleTokenizer, match="another tokenizer"):
        make_dspark(options(foreign), model, host)
    small = options(folder).model_copy(update={"kv_cache_gb": 1e-9})
    with pytest.raises(InvalidField, match="kv_cache_gb"):
        make_dspark(small, model, host)


def test_a_target_with_a_head_of_its_own_shares_that(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "model", num_layers=3, hidden_size=64, intermediate_size=96)
    raw = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(257, 64)  # always token 6 or token 8
    weights["lm_head.weight"][6] = 1000 * torch.randn(64)
    weights["lm_head.weight"][8] = -weights["lm_head.weight"][6]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    folder = write_dspark(tmp_path / "drafter", target, draft_token_ids=list(range(0, 257, 2)))
    engine, model = engine_of(target, (0, 2))
    drafter = make_dspark(options(folder), model, Host(engine, target))
    with EmbeddedCluster(
        engine, model, PRECIOUS, {"dspark": PoolEntry(drafter, companion=True)}, StepPlanner(PATIENT)
    ) as cluster:
        completions = cluster.complete(requests(2))
    assert {token for token_ids in outputs(completions) for token in token_ids} <= {6, 8}
    assert sum(c.num_accepted for c in completions) > sum(c.num_proposed for c in completions) / 20 > 0


class _NotesThreads(_Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.threads.add(threading.current_thread().name)
        return super().propose(demands)


def test_a_companion_without_a_partition_drafts_on_the_target_s_thread(target: Path, plain: list[list[int]]) -> None:
    """On cores that both use, a thread of its own would slow both."""
    engine, model = engine_of(target, ())
    drafter = _NotesThreads()
    with EmbeddedCluster(engine, model, COST, {"one": PoolEntry(drafter, companion=True)}) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
    assert len(drafter.threads) == 1
    assert "target" in drafter.threads.pop()
