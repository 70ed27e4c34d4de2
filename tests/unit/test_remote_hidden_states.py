"""Drafters that read hidden states in a process of their own."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.drafter import DrafterActor
from actors.gateway import LinkClient
from actors.target import TargetActor
from benchmarks.completion import Completion
from cluster.client import ClusterStatus
from cluster.config import DrafterConfig, HiddenStateOptions
from cluster.messages import DraftRound, Extend, Open
from cluster.resolve import resolve
from cluster.transport.tensors import Frame, Part, TensorEnd
from cluster.types import Request
from drafters.hidden_states.host import Host, make_hidden_state_drafter
from drafters.hidden_states.received import ReceivedStates, remote_host
from drafters.protocol import Demand
from drafters.session import key_of
from engine.feature_feed import FeatureFeed
from engine.native import NativeTarget
from engine.target import FeatureSpan
from router.assignment import member_name
from router.plan import Span
from tests.support.colocated import NODES, config, engine_of, outputs, plain_outputs, requests, write_target
from tests.support.dspark import write_dspark
from tests.support.memory_tensors import MemoryTensors
from tests.support.settings import ALWAYS_DRAFTED
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


def test_what_is_lost_is_dropped_and_told_once(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = engine_of(target, (0,))
    states, size = ReceivedStates((0,), engine.embedding, max_bytes=0), engine.embedding.shape[1]
    for name in ("a", "b"):
        states.receive(0, Frame((Part(name, 0, 2, 2),), (), torch.ones(2, size)))
    states.receive(0, Frame((), ()))
    assert ["the hidden states of 0/a" in caplog.messages[0], len(caplog.messages)] == [True, 2]


def feed_to(engine: NativeTarget, states: ReceivedStates) -> FeatureFeed:
    kept, read, size = engine.feature_layers, states.feature_layers, engine.embedding.shape[1]
    columns = torch.cat([torch.arange(size) + size * kept.index(layer) for layer in read])
    feed = FeatureFeed(engine, columns)
    feed.connect(MemoryTensors(TensorEnd(partial(states.receive, 0), lambda _: None)))
    return feed
