"""DSpark drafters in the target's process: what they load and refuse, and never a reason for another token."""

import json
import threading
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.target import TargetActor
from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import CascadeOptions, Config, DrafterConfig, HiddenStateKind, HiddenStateOptions, NgramOptions
from cluster.errors import IncompatibleTokenizer, InvalidField, ModelUnavailable
from cluster.placement import place
from cluster.resolve import resolve
from drafters.hidden_states.features import FeatureShape, HostFeatures
from drafters.hidden_states.host import Host, make_hidden_state_drafter
from drafters.registry import feature_layers, make_drafter
from engine.partition import usable_cores
from router.assignment import member_name
from router.cost_model import TableCost
from router.plan import Span
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.colocated import COST, NODES, config, engine_of, outputs, plain_outputs, requests, write_target
from tests.support.dspark import write_dspark, write_speculators
from tests.support.features import rows_of
from tests.support.quick import first
from tests.support.requests import a_request
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("known_costs"), pytest.mark.slow]  # together they take seconds

PRECIOUS = TableCost((1,), (6000.0,))
PATIENT = PlannerSettings(verification="all", max_hold_s=60.0, max_chunk_len=24)  # with PRECIOUS, all drafts are awaited


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return write_dspark(tmp_path_factory.mktemp("tiny") / "drafter", target, anchor_input=True, anchor_input_rank=4)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A drafter that reads other layers."""
    folder = tmp_path_factory.mktemp("tiny") / "other"
    return write_dspark(folder, target, seed=4, target_layer_ids=[-1, 1], markov_head_type="rnn")


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return plain_outputs(target)


def options(folder: Path, kind: HiddenStateKind = "dspark") -> HiddenStateOptions:
    return HiddenStateOptions(kind=kind, path=str(folder), dtype="float32", kv_cache_gb=0.01, min_survival=0.0)


@pytest.mark.slow
def test_two_companions_and_one_in_a_cascade_leave_the_tokens_as_they_are(
    target: Path, folder: Path, other: Path, plain: list[list[int]]
) -> None:
    """They read different layers of the same pass."""
    pool = (
        DrafterConfig(name="dspark", options=options(folder), max_draft_len=6),
        DrafterConfig(name="rnn", options=options(other), max_draft_len=4),
        DrafterConfig(name="cascade", options=CascadeOptions(members=(NgramOptions(), options(other))).costing((0.0, 0.0))),
    )
    resolved = resolve(config(target, pool), NODES).model_copy(update={"planner": config(target, ()).planner})
    with EmbeddedCluster.of(resolved) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
        for name in ("dspark", "rnn", "cascade"):
            assert cluster.loop.telemetry.drafter(name).reply_s.num


def test_every_kind_beside_the_others_leaves_the_tokens_as_they_are(
    target: Path, tmp_path: Path, plain: list[list[int]]
) -> None:
    """Also EAGLE-3 without a head of its own."""
    kinds = get_args(HiddenStateKind)
    for kind in kinds:
        write_speculators(tmp_path / kind, target, kind, draft_token_ids=tuple(range(0, 256, 3)))
    pool = tuple(DrafterConfig(name=kind, options=options(tmp_path / kind, kind), max_draft_len=6) for kind in kinds)
    resolved = resolve(config(target, pool), NODES).model_copy(update={"planner": config(target, ()).planner})
    with EmbeddedCluster.of(resolved) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
        assert all(cluster.loop.telemetry.drafter(kind).reply_s is not None for kind in kinds)


@pytest.mark.parametrize("num_blocks", first(1, [9, 64]))
def test_drafts_are_verified_also_when_sequences_are_preempted(
    target: Path, folder: Path, plain: list[list[int]], num_blocks: int
) -> None:
    """Nine blocks hold two or three of the six sequences, in chunks of 24: features come and go."""
    engine, model = engine_of(target, (0, 2), num_blocks)
    drafter = make_hidden_state_drafter(options(folder), model, Host(engine, target))
    pool = {"dspark": PoolEntry(drafter, max_draft_len=6, companion=True)}
    with EmbeddedCluster(engine, model, PRECIOUS, pool, StepPlanner(PATIENT)) as cluster:
        completions = cluster.complete(requests(6))
        assert outputs(completions) == plain
        assert sum(completion.num_proposed for completion in completions) > 20
        assert bool(cluster.loop.telemetry.num_preempted) == (num_blocks == 9)
    engine.check_integrity()
    drafter.check_integrity()


@pytest.mark.slow
def test_a_drafter_whose_link_was_killed_follows_again(target: Path, folder: Path, plain: list[list[int]]) -> None:
    """A killed link is found again; what was followed is opened anew."""
    engine, model = engine_of(target, (0, 2))
    drafter = make_hidden_state_drafter(options(folder), model, Host(engine, target))
    with EmbeddedCluster(engine, model, COST, {"dspark": PoolEntry(drafter, companion=True)}) as cluster:
        assert outputs(cluster.complete(requests(6))) == plain
        cluster.kill_drafter("dspark")
        assert outputs(cluster.complete(requests(6))) == plain
        before = cluster.loop.telemetry.drafter("dspark").num_proposed
        cluster.start_drafter("dspark", PoolEntry(drafter, companion=True))
        completions = cluster.complete(requests(6))
        assert outputs(completions) == plain
        assert cluster.loop.telemetry.drafter("dspark").num_proposed >= before


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


def test_a_target_process_divides_its_device_if_it_is_told_to(target: Path, folder: Path) -> None:
    resolved = resolve(config(target, (DrafterConfig(name="dspark", options=options(folder)),)), NODES)
    divided = resolved.target.model_copy(update={"partition": "on"})
    actor = TargetActor(resolved.model_copy(update={"target": divided}), "target-1", "memory://a-divided-target", "secret")
    if len(usable_cores().cores) < 2:
        with pytest.raises(InvalidField, match="too few cores"):
            actor.start()
        return
    try:
        actor.start()
        eventually(lambda: f"lane {member_name('dspark', 0)}" in {thread.name for thread in threading.enumerate()})
        eventually(lambda: actor.slot_report().drafters == (member_name("dspark", 0),))
    finally:
        actor.stop()
    assert f"lane {member_name('dspark', 0)}" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ValueError, match="auto or off without a drafter in the target's process"):
        Config(target={"partition": "on"}, drafters=())
    with pytest.raises(ValueError, match="auto or off on the vllm engine or with several ranks"):
        Config(target={"partition": "on", "engine": "vllm"})


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
    assert feature_layers(drafters, target) == (-1, 0, 1, 2)
    engine, _ = engine_of(target, (-1, 0, 1, 2))
    prompt = tuple(range(30))
    request = a_request("r", prompt, max_tokens=3)
    engine.open(request, prompt)
    engine.execute([Span.bound("r", 0, prompt)])
    whole = rows_of(engine, "r", 0, 30)
    picked = rows_of(HostFeatures(engine, FeatureShape((0, 2), 64)), "3/r", 4, 9)
    assert picked.equal(whole[4:9].view(5, 4, 64)[:, [1, 3]].flatten(1))
    with pytest.raises(InvalidField, match=r"must hold \[2\]"):
        HostFeatures(engine_of(target, (0,))[0], FeatureShape((0, 2), 64))


def test_what_does_not_fit_the_target_is_refused(target: Path, folder: Path, tmp_path: Path) -> None:
    engine, model = engine_of(target, (0, 2))
    host = Host(engine, target)
    with pytest.raises(InvalidField, match="must run in the target's process"):
        make_drafter(DrafterConfig(name="d", options=options(folder)), model)
    with pytest.raises(ModelUnavailable, match="no folder of a trained drafter"):
        make_hidden_state_drafter(options(tmp_path / "nowhere"), model, host)
    deeper = write_dspark(tmp_path / "deeper", target, num_target_layers=4)
    with pytest.raises(ModelUnavailable, match=r"made for a target of 4 layers.* has 3"):
        make_hidden_state_drafter(options(deeper), model, host)
    foreign = write_dspark(tmp_path / "foreign", target, tokenizer_fingerprint="0" * 64)
    with pytest.raises(IncompatibleTokenizer, match="another tokenizer"):
        make_hidden_state_drafter(options(foreign), model, host)
    small = options(folder).model_copy(update={"kv_cache_gb": 1e-9})
    with pytest.raises(InvalidField, match="kv_cache_gb"):
        make_hidden_state_drafter(small, model, host)


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
    drafter = make_hidden_state_drafter(options(folder), model, Host(engine, target))
    with EmbeddedCluster(
        engine, model, PRECIOUS, {"dspark": PoolEntry(drafter, companion=True)}, StepPlanner(PATIENT)
    ) as cluster:
        completions = cluster.complete(requests(2))
    assert {token for token_ids in outputs(completions) for token in token_ids} <= {6, 8}
    assert sum(c.num_accepted for c in completions) > sum(c.num_proposed for c in completions) / 20 > 0
