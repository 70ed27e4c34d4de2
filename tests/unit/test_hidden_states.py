"""Drafters that read hidden states, in the target's process or in one of their own: never a reason for another token."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.drafter import DrafterActor
from actors.gateway import LinkClient
from actors.target import TargetActor
from benchmarks.embedded import Completion, EmbeddedCluster, PoolEntry
from cluster.client import ClusterStatus
from cluster.config import CascadeOptions, Config, DrafterConfig, HiddenStateKind, HiddenStateOptions, NgramOptions
from cluster.errors import IncompatibleTokenizer, InvalidField, ModelUnavailable
from cluster.messages import DraftRound, Extend, Open
from cluster.placement import place
from cluster.resolve import resolve
from cluster.transport.tensors import Frame, Part, TensorEnd
from cluster.types import Request
from drafters.hidden_states.features import FeatureShape, HostFeatures
from drafters.hidden_states.host import Host, make_hidden_state_drafter
from drafters.hidden_states.received import ReceivedStates, remote_host
from drafters.protocol import Demand
from drafters.registry import feature_layers, make_drafter
from drafters.session import key_of
from engine.feature_feed import FeatureFeed
from engine.native import NativeTarget
from engine.partition import usable_cores
from engine.target import FeatureSpan
from router.assignment import member_name
from router.cost_model import TableCost
from router.plan import Span
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.colocated import COST, NODES, config, engine_of, outputs, plain_outputs, requests, write_target
from tests.support.dspark import write_dspark, write_speculators
from tests.support.features import rows_of
from tests.support.memory_tensors import MemoryTensors
from tests.support.quick import first
from tests.support.requests import a_request
from tests.support.settings import ALWAYS_DRAFTED
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("known_costs"), pytest.mark.slow]
NAME = member_name("dspark", 0)
SECRET = "secret"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return write_dspark(tmp_path_factory.mktemp("tiny") / "drafter", target, anchor_input=True, anchor_input_rank=4)


def pool_of(folder: Path, remote: bool) -> DrafterConfig:
    options = HiddenStateOptions(kind="dspark", path=str(folder), dtype="float32", kv_cache_gb=0.01, min_survival=0.0)
    return DrafterConfig(name="dspark", options=options, max_draft_len=6, remote=remote)


@contextmanager
def cluster(target: Path, folder: Path, tmp_path: Path) -> Iterator[tuple[TargetActor, DrafterActor, LinkClient]]:
    patient = ALWAYS_DRAFTED.model_copy(update={"max_hold_ms": 60_000})
    resolved = resolve(config(target, (pool_of(folder, True),)), NODES).model_copy(update={"planner": patient})
    actor = TargetActor(resolved, "target-0", f"unix://{tmp_path}/target", SECRET)
    info = actor.start()
    drafter = DrafterActor(resolved.drafters[0], NAME, info.model, [info.address], SECRET)
    drafter.start()

    async def status() -> ClusterStatus:
        raise NotImplementedError

    client = LinkClient("test", info.model, [info.address], status, token=SECRET)
    try:
        eventually(lambda: actor.slot_report().drafters == (NAME,))
        assert client.wait_linked(10.0)
        yield actor, drafter, client
    finally:
        asyncio.run(client.close())
        drafter.stop()
        actor.stop()


def complete(client: LinkClient, asked: Sequence[Request]) -> list[Completion]:
    async def one(request: Request) -> Completion:
        completion = Completion()
        async with aclosing(client.generate(request)) as commits:
            async for commit in commits:
                completion.add(commit)
        return completion

    async def run() -> list[Completion]:
        return list(await asyncio.gather(*map(one, asked)))

    return asyncio.run(run())


def test_a_drafter_with_its_tensor_link_changes_no_token(target: Path, folder: Path, tmp_path: Path) -> None:
    """Nor does one whose link is cut while it drafts; it comes back and drafts on."""
    plain = plain_outputs(target)
    with cluster(target, folder, tmp_path) as (actor, _, client):
        counts = actor._loop.telemetry.drafter(NAME)
        assert outputs(complete(client, requests(6))) == plain
        before = counts.num_proposed
        assert before > 100
        asked = [replace(request, id=f"again-{request.id}") for request in requests(6)]
        with ThreadPoolExecutor(1) as executor:
            answered = executor.submit(complete, client, asked)
            eventually(lambda: counts.num_proposed > before + 20)
            actor._loop._drafters._outboxes[NAME].feed._link.close()
            assert outputs(answered.result()) == plain
        eventually(lambda: actor.slot_report().drafters == (NAME,))
        eventually(lambda: actor._loop._drafters._outboxes[NAME].feed._link is not None)
        before = counts.num_proposed
        assert outputs(complete(client, [replace(request, id=f"last-{request.id}") for request in requests(6)])) == plain
        assert counts.num_proposed > before + 100


def test_it_drafts_what_a_drafter_in_the_target_s_process_does(target: Path, folder: Path) -> None:
    """In batches, while requests come, go on and end."""
    engine, model = engine_of(target, (-1, 0, 2))
    options = pool_of(folder, True).options
    assert isinstance(options, HiddenStateOptions)
    host, states = remote_host(options.of_target(str(target)), "cpu")
    here, there = (
        make_hidden_state_drafter(options, model, Host(engine, target)),
        make_hidden_state_drafter(options, model, host),
    )
    feed = feed_to(engine, states)
    texts: dict[str, list[int]] = {}
    for number in range(30):
        message = DraftRound(1)
        if number % 5 == 0:
            request = requests(6)[number // 5]
            texts[request.id] = list(request.prompt_token_ids)
            engine.open(request, request.prompt_token_ids)
            engine.execute([Span.bound(request.id, 0, request.prompt_token_ids[:-1], samples=False)])
            for drafter in (here, there):
                drafter.open(key_of(0, request.id), texts[request.id], len(texts[request.id]), request.sampling)
            message = DraftRound(1, (Open(request.id, tuple(texts[request.id]), len(texts[request.id]), request.sampling),))
        feed.feed(message)
        demands = [Demand(key_of(0, name), 5) for name in texts]
        drafts = here.propose(demands)
        assert there.propose(demands) == drafts
        assert all(draft.token_ids for draft in drafts)
        spans = [Span.bound(name, len(text) - 1, (text[-1],)) for name, text in texts.items()]
        extends = []
        for outcome in engine.execute(spans):
            text = texts[outcome.request_id]
            extends.append(Extend(outcome.request_id, len(text), outcome.chosen))
            text += outcome.chosen
            for drafter in (here, there):
                drafter.extend(key_of(0, outcome.request_id), outcome.chosen)
        feed.feed(DraftRound(1, extends=tuple(extends)))


def test_requests_without_room_on_the_link_are_drafted_for_no_more(target: Path, folder: Path) -> None:
    """The others are; one that is opened anew is again. What the drafter holds is bounded, too."""
    engine, _ = engine_of(target, (0,))
    states = ReceivedStates((0,), engine.embedding, wait_s=5.0)
    link = MemoryTensors(TensorEnd(partial(states.receive, 0), lambda _: None), max_bytes=30 * 64 * 4)
    feed = FeatureFeed(engine, None)
    feed.connect(link)
    link.allow.clear()
    for request in requests(2):  # of 20 and 29 tokens
        engine.open(request, request.prompt_token_ids)
        engine.execute([Span.bound(request.id, 0, request.prompt_token_ids, samples=False)])
        opened = Open(request.id, request.prompt_token_ids, len(request.prompt_token_ids), request.sampling)
        feed.feed(DraftRound(1, (opened,)))
    link.allow.set()
    found = [FeatureSpan("r0", 0, 19), FeatureSpan("r1", 0, 28)]
    named = [replace(span, request_id=key_of(0, span.request_id)) for span in found]
    assert states.read_hidden_states(named)[0] == [True, False]

    def reopened() -> bool:
        feed.feed(DraftRound(1, (opened,)))
        return states.read_hidden_states(named)[0] == [True, True]

    eventually(reopened)
    assert torch.equal(states.read_hidden_states(named)[1], engine.read_hidden_states(found)[1])
    small = ReceivedStates((0,), engine.embedding, max_bytes=40 * 64 * 4)
    for name, span in (("r0", found[0]), ("r1", found[1])):
        part = Part(name, 0, span.stop, span.stop)
        small.receive(0, Frame((part,), (), engine.read_hidden_states([span])[1]))
    assert small.read_hidden_states(named)[0] == [False, True]


def test_long_contexts_are_fed_in_pieces_behind_short_ones(target: Path) -> None:
    """As they are computed; one that waits to be computed holds up no other."""
    engine, _ = engine_of(target, (0,))
    states, feed = ReceivedStates((0,), engine.embedding), FeatureFeed(engine, None)
    feed.connect(mock.Mock(send=lambda frame: lens.append(frame.num_bytes // 256) or states.receive(0, frame) or True))
    lens, asked = list[int](), [replace(one, id=f"{len(one.prompt_token_ids)}") for one in requests(6)]
    opens = [Open(one.id, one.prompt_token_ids, len(one.prompt_token_ids), one.sampling) for one in asked]
    for request in asked:
        engine.open(request, request.prompt_token_ids)
    with mock.patch("engine.feature_feed._MAX_ROWS", 24):
        feed.feed(DraftRound(1, tuple(opens)))
        for request in asked[:1] + asked[2:]:
            engine.execute([Span.bound(request.id, 0, request.prompt_token_ids, samples=False)])
        for _ in range(20):
            feed.feed(DraftRound(1))
    spans = [FeatureSpan(one.id, 0, len(one.prompt_token_ids) - 1) for one in asked]
    held, rows = states.read_hidden_states([replace(one, request_id=key_of(0, one.request_id)) for one in spans])
    assert held == [True, False, True, True, True, True]
    assert torch.equal(rows, engine.read_hidden_states(spans[:1] + spans[2:])[1])
    assert max(lens) == 24


def test_targets_use_the_same_ids_and_a_lost_one_leaves_nothing(target: Path) -> None:
    engine, _ = engine_of(target, (0,))
    states, size = ReceivedStates((0,), engine.embedding), engine.embedding.shape[1]
    for number in (1, 12):
        states.receive(number, Frame((Part("r", 0, 2, 2),), (), torch.full((2, size), float(number))))
    wanted = [FeatureSpan(key_of(number, "r"), 0, 2) for number in (1, 12)]
    held, rows = states.read_hidden_states(wanted)
    assert held == [True, True]
    assert rows[:, 0].tolist() == [1.0, 1.0, 12.0, 12.0]
    states.forget(1)
    assert states.read_hidden_states(wanted)[0] == [False, True]


def test_a_drafter_waits_for_rows_that_are_late_once(target: Path) -> None:
    engine, _ = engine_of(target, (0,))
    states = ReceivedStates((0,), engine.embedding, wait_s=0.05)
    span = [FeatureSpan(key_of(0, "a"), 0, 3)]
    assert states.read_hidden_states(span)[0] == [False]
    began_s = time.thread_time()
    for _ in range(100):
        assert states.read_hidden_states(span)[0] == [False]
    assert time.thread_time() - began_s < 1.0
    rows = torch.ones(3, engine.embedding.shape[1])
    threading.Timer(0.01, states.receive, [0, Frame((Part("b", 0, 3, 3),), (), rows)]).start()
    eventually(lambda: states.read_hidden_states([FeatureSpan(key_of(0, "b"), 0, 3)])[0] == [True])


def test_a_link_that_comes_too_late_is_closed(target: Path) -> None:
    engine, _ = engine_of(target, (0,))
    feed, reasons = FeatureFeed(engine, None), list[str]()
    feed.close()
    feed.connect(MemoryTensors(TensorEnd(lambda _: None, reasons.append)))
    eventually(lambda: len(reasons) == 1)


def test_what_is_dropped_is_told_once_and_what_was_not_read_is_kept(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that has computed the others goes on."""
    engine, _ = engine_of(target, (0,))
    size, found = engine.embedding.shape[1], list[tuple[list[bool], list[float]]]()
    states = ReceivedStates((0,), engine.embedding, max_bytes=4 * 4 * size)
    for name, start in (("a", 0), ("b", 0), ("a", 3)):
        rows = torch.arange(start, start + 3.0)[:, None].expand(3, size)
        states.receive(0, Frame((Part(name, start, start + 3, start + 3),), (), rows))
        held, rows = states.read_hidden_states([FeatureSpan(key_of(0, "a"), one, start + 3) for one in (0, 1)])
        found.append((held, rows[:, 0].tolist()))
    assert (found[0], found[2]) == (([True] * 2, [0.0, 1.0, 2.0, 1.0, 2.0]), ([False, True], [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert ["the hidden states of 0/a" in caplog.messages[0], len(caplog.messages)] == [True, 2]


def feed_to(engine: NativeTarget, states: ReceivedStates) -> FeatureFeed:
    kept, read, size = engine.feature_layers, states.feature_layers, engine.embedding.shape[1]
    columns = torch.cat([torch.arange(size) + size * kept.index(layer) for layer in read])
    feed = FeatureFeed(engine, columns)
    feed.connect(MemoryTensors(TensorEnd(partial(states.receive, 0), lambda _: None)))
    return feed


# ---- in the target's process: what they load and refuse


PRECIOUS = TableCost((1,), (6000.0,))
PATIENT = PlannerSettings(verification="all", max_hold_s=60.0, max_chunk_len=24)  # with PRECIOUS, all drafts are awaited


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
