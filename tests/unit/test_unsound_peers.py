"""Peers that send whatever they like: no loop or gateway ends by it, no other request changes; who goes on is unlinked."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest

from actors.gateway import LinkClient
from benchmarks.unsound import Unsound
from cluster.config import DrafterConfig, NgramOptions, PolicyConfig, SuffixOptions
from cluster.errors import LinkClosed, OutriderError
from cluster.message_checks import MAX_UNSOUND
from cluster.messages import (
    CommitRound,
    DraftRound,
    DraftScore,
    Hello,
    LevelReport,
    Open,
    OutcomeReport,
    ProposalRound,
    Role,
    SubmitRound,
    Verified,
)
from cluster.sampling_params import SamplingParams
from cluster.transport import listen
from cluster.transport.base import LinkDown, LinkUp, Mailbox, Received
from cluster.transport.dialer import Dialer
from cluster.types import Commit, FinishReason, Prefill, Request, Slo
from drafters.loop import DrafterLoop
from drafters.protocol import Drafter
from drafters.registry import make_drafter
from drafters.sessions import SessionLimits
from router import assignment
from router.assignment import PoolMember, Positions, RequestView
from router.drafter.policies import build_policy, scored_by
from router.drafter.router import Router, SlotReport
from tests.support.drafter_bench import SAMPLING, Bench, FakeLink
from tests.support.quick import first
from tests.support.requests import a_request
from tests.support.simulated_cluster import SimulatedCluster, random_requests
from tests.support.simulated_network import Faults
from tests.support.toys import MODEL, VOCAB_SIZE, ToyDrafter, plain_run

MAX_INT = 2**31 - 1


class UnsoundDrafter:
    """In the place of a drafter's loop: it answers with nonsense about the requests that it was told of."""

    def __init__(self, seed: int, name: str, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._known: list[str] = []
        self._draws = Unsound(seed, self._known, name, VOCAB_SIZE)
        self._rng = random.Random(seed)
        self.num_cut = 0
        self._link: object = None

    def step(self, now_s: float) -> bool:
        for event in self._mailbox.drain():
            match event:
                case LinkUp(link):
                    self._link = link
                case LinkDown():
                    self.num_cut += 1
                    self._link = None
                case Received(_, DraftRound() as message):
                    self._known.extend(opening.request_id for opening in message.opens)
        if self._link is None or self._rng.random() < 0.5:
            return False
        message = self._draws.any_round() if self._rng.random() < 0.1 else self._draws.proposal_round()
        try:
            self._link.send(message)  # type: ignore[attr-defined]
        except OutriderError:
            self._link = None
        return True

    def next_due_s(self) -> None:
        return None


def routers() -> list[Router]:
    """One that learns from scores, and the scheduler of chains."""
    pool = [PoolMember(f"toy-{i}", capacity=8, cost=0.1, verifies=True) for i in range(2)]
    return [
        Router(build_policy(policy), pool, scored=scored_by(policy))
        for policy in (PolicyConfig(kind="hedge"), PolicyConfig(kind="chain"))
    ]


@pytest.mark.parametrize("seed", first(1, range(6)))
def test_no_message_of_a_drafter_ends_a_target_or_a_router(seed: int) -> None:
    cluster = SimulatedCluster(seed, Faults(), crash=0.0, hang=0.0, num_drafters=2)
    bad = cluster.drafters["toy-1"]
    unsound = UnsoundDrafter(seed, "toy-1", bad.mailbox)
    bad.loop = unsound  # type: ignore[assignment]
    learning = routers()
    rng = random.Random(seed)
    requests = random_requests(rng)
    for request in requests:
        cluster.submit(request)
    for _ in range(400):
        cluster.turn()
        report = SlotReport(
            cluster.loop.requests(),
            cluster.loop.telemetry.take_observations(),
            cluster.loop.status().table_version,
            ("toy-0", "toy-1"),
            scores=cluster.loop.telemetry.take_scores(),
            levels=cluster.loop.telemetry.take_levels(),
            target_passes=((1, 0.02), (8, 0.025)),
        )
        for router in learning:
            router.slot([report])
    cluster.run_until_finished()
    for request in requests:
        assert tuple(cluster.outcomes[request.id].token_ids) == plain_run(request)
    cluster.engine.check_integrity()
    assert cluster.engine.ledger.num_free_blocks == cluster.engine.num_blocks
    assert cluster.loop.telemetry.drafter("toy-1").num_unsound > 0
    assert cluster.loop.telemetry.drafter("toy-0").num_unsound == 0
    assert unsound.num_cut > 0


def test_routers_learn_nothing_of_drafters_that_are_not_in_the_pool() -> None:
    for router in routers():
        before = router.policy.snapshot()
        strange = LevelReport("toy-0", 1, 1, 0.1, 0, (Verified("stranger", (1,), (1,), 1, 1),))
        scores = (assignment.ScoreCounts("r", "stranger", Positions((9,), (9,))),)
        view = RequestView("r", 3, 5, ())
        for _ in range(3):
            router.slot([SlotReport((view,), (), 0, ("toy-0", "toy-1", "stranger"), scores=scores, levels=(strange,))])
        assert router.policy.snapshot() == before


@pytest.mark.parametrize(
    "message",
    [
        ProposalRound(0, scores=(DraftScore("r0", 5, MAX_INT, MAX_INT),)),
        ProposalRound(0, scores=(DraftScore("r0", 5, 3, 2),)),
        ProposalRound(0, levels=(LevelReport("toy-0", 1, 1, float("nan"), 0),)),
        ProposalRound(0, levels=(LevelReport("toy-0", 1, 1, 0.1, 0, (Verified("toy-1", (3, 3, 3), (9,)),)),)),
        ProposalRound(0, levels=(LevelReport("toy-0", 1, 1, 0.1, 0, (Verified("toy-1", (1,), (5,), 2, 9),)),)),
        ProposalRound(0, levels=(LevelReport("toy-0", 1, 1, 0.1, 0, (Verified("toy-1", (), (), 2, 2, 1, 1.5),)),)),
        ProposalRound(0, levels=(LevelReport("toy-0", MAX_INT, MAX_INT, 1e300, 0),)),
        ProposalRound(0, outcomes=(OutcomeReport(5, 4, 3, 9),)),
    ],
)
def test_what_is_unsound_is_dropped_and_counted(message: ProposalRound) -> None:
    cluster = SimulatedCluster(1, Faults(), crash=0.0, hang=0.0, num_drafters=1)
    cluster.turn()
    cluster.drafters["toy-0"].link.send(message)
    cluster.turn()
    cluster.turn()
    loop = cluster.loop
    assert loop.telemetry.drafter("toy-0").num_unsound == 1
    assert (loop.telemetry.take_scores(), loop.telemetry.take_levels()) == ((), ())
    assert loop.status().followed == (("toy-0", 0),), "one mistake costs no link"


def test_a_gateway_that_asks_for_nonsense_harms_nobody_else() -> None:
    cluster = SimulatedCluster(3, Faults(), crash=0.0, hang=0.0, num_drafters=1)
    requests = random_requests(random.Random(3))
    mailbox = Mailbox()
    hello = Hello(Role.GATEWAY, "bad", VOCAB_SIZE, "")
    link = cluster.local.connect("memory://gateway", mailbox, hello)
    draws = Unsound(5, [f"bad-{i}" for i in range(4)] + [request.id for request in requests], "toy-0", VOCAB_SIZE)
    for request in requests:
        cluster.submit(request)
    cluster.turn()
    num_cut = 0
    for _ in range(300):
        try:
            link.send(draws.submit_round())
        except OutriderError:
            num_cut += 1
            link = cluster.local.connect("memory://gateway", mailbox, hello)
        cluster.turn()
        mailbox.drain()
    link.close()
    cluster.run_until_finished()
    for request in requests:
        assert tuple(cluster.outcomes[request.id].token_ids) == plain_run(request)
    cluster.turn()
    assert cluster.engine.ledger.num_free_blocks == cluster.engine.num_blocks
    assert num_cut > 0


@pytest.mark.parametrize(
    "harmful",
    [
        {"prompt_token_ids": (1, VOCAB_SIZE)},
        {"sampling": SamplingParams(max_tokens=4, stop_token_ids=(VOCAB_SIZE,))},
        {"sampling": SamplingParams(max_tokens=4, logit_bias=((2**32 - 1, 1.0),))},
        {"arrival_s": float("nan")},
        {"slo": Slo(ttft_s=float("inf"))},
        {"slo": Slo(ttft_s=-1.0)},
        {"slo": Slo(tpot_s=0.0)},
        {"slo": Slo(name="")},
        {"chain": ("toy-0",) * 9},
        {"chain": ("",)},
    ],
)
def test_a_request_that_would_do_harm_is_refused_with_a_reason(harmful: dict[str, object]) -> None:
    cluster = SimulatedCluster(1, Faults(), crash=0.0, hang=0.0, num_drafters=1)
    one = Request("r", (1, 2), SamplingParams(max_tokens=4), 0.0)
    cluster.submit(replace(one, **harmful))  # type: ignore[arg-type]
    cluster.run_until_finished()
    assert cluster.outcomes["r"].finish is FinishReason.ERROR


# Drafters.


def lookups(kind: str) -> Drafter:
    options = {"ngram": NgramOptions(), "suffix": SuffixOptions()}.get(kind)
    return (
        ToyDrafter(random.Random(1)) if options is None else make_drafter(DrafterConfig(name=kind, options=options), MODEL)
    )


@pytest.mark.parametrize("kind", ["toy", "ngram", "suffix"])
@pytest.mark.parametrize("seed", range(4))
def test_no_message_of_a_target_ends_a_drafter(kind: str, seed: int) -> None:
    mailbox = Mailbox()
    loop = DrafterLoop("d", lookups(kind), mailbox, SessionLimits(capacity=4, max_draft_len=4, max_shadows=4))
    bad = FakeToyLink("bad")
    draws = Unsound(seed, [f"r{i}" for i in range(5)], "d", VOCAB_SIZE)
    rng = random.Random(seed)
    mailbox.put(LinkUp(bad))
    num_cut = 0
    for turn in range(400):
        mailbox.put(Received(bad, draws.any_round() if rng.random() < 0.05 else draws.draft_round()))
        for _ in range(3):
            loop.step(float(turn))
        loop.check_integrity()
        if bad.closed:
            num_cut += 1
            bad = FakeToyLink("bad")
            mailbox.put(LinkUp(bad))
    loop.step(400.0)  # the last link may be new
    assert num_cut > 0
    assert len(loop.sessions.peers) == 1


class FakeToyLink(FakeLink):
    @property
    def peer(self) -> Hello:
        return Hello(Role.TARGET, self.name, VOCAB_SIZE, "toy")


def test_a_target_that_sends_nonsense_costs_others_nothing_and_is_dialled_again() -> None:
    bench = Bench()
    bad = FakeLink("bad")
    bench.mailbox.put(LinkUp(bad))
    bench.open("a", 10)
    bench.settle()
    assert [proposal.base_len for proposal in bench.link.take()] == [10]
    for _ in range(MAX_UNSOUND):
        bench.mailbox.put(Received(bad, DraftRound(1, releases=("",))))
    bench.loop.step(0.0)
    assert bad.closed
    assert [event.link for event in bench.mailbox.drain() if isinstance(event, LinkDown)] == [bad], "the dialler must know"
    bench.extend("a", 10, 10)
    bench.settle()
    assert [proposal.base_len for proposal in bench.link.take()] == [11]


def test_nobody_makes_a_drafter_follow_more_than_was_announced() -> None:
    bench = Bench()
    bench.open("a", 10, max_tokens=5)
    bench.extend("a", 10, 10, 11, 12, 13, 14)
    bench.extend("a", 15, 15)
    bench.settle()
    assert bench.drafter.texts == {"0/a": list(range(15))}


def test_tokens_outside_the_vocabulary_reach_no_drafter() -> None:
    bench = Bench()
    bench.open("a", 10)
    bench.extend("a", 10, 100)
    bench.mail(opens=(_opening("b", (1, 2, 100)), _opening("c", (1, 2, 3))))
    bench.settle()
    assert bench.drafter.texts == {"0/a": list(range(10)), "0/c": [1, 2, 3]}


def _opening(request_id: str, token_ids: tuple[int, ...]) -> Open:
    return Open(request_id, token_ids, len(token_ids), SAMPLING)


# ---- targets that send gateways whatever they like: no gateway ends by it, and its callers are told


_NUMBERS = count()


class BadTarget:
    """A listener that answers as it is told."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.address = f"memory://unsound-{next(_NUMBERS)}"
        self._listener = listen(self.address, self.mailbox, Hello(Role.TARGET, "t", VOCAB_SIZE, "toy"))

    async def submitted(self) -> tuple[object, Request]:
        while True:
            if not await asyncio.to_thread(self.mailbox.wait, 10.0):
                raise AssertionError("nothing was submitted")
            for event in self.mailbox.drain():
                if isinstance(event, Received) and isinstance(event.message, SubmitRound) and event.message.submits:
                    return event.link, event.message.submits[0]

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def target() -> Iterator[BadTarget]:
    target = BadTarget()
    yield target
    target.close()


async def _no_status() -> object:
    raise AssertionError("nobody asks")


def client_of(target: BadTarget) -> LinkClient:
    client = LinkClient("test", MODEL, [target.address], _no_status)  # type: ignore[arg-type]
    assert client.wait_linked(10.0)
    return client


def request(name: str) -> Request:
    return a_request(name, (1, 2, 3), max_tokens=4, temperature=0.0)


async def outcome(client: LinkClient, one: Request) -> list[int] | str:
    """Its tokens, or why there are none."""
    token_ids: list[int] = []
    try:
        async for commit in client.generate(one):
            token_ids.extend(commit.token_ids)
    except OutriderError as error:
        return str(error)
    return token_ids


@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        (Commit("a", 3, (VOCAB_SIZE,)), "outside the vocabulary"),
        (Commit("a", 4, (1,)), "a commit at 4 after 3 committed tokens"),
        (Commit("a", 3, (1, 1, 1, 1, 1)), "1 tokens more than the request allows"),
        (Commit("a", 3, ()), "a commit of nothing"),
        (Commit("a", 3, (1,), prefill=Prefill(4, 0.0, 0.0)), "a commit at 3 with 4 cached tokens"),
        (Commit("a", 3, (1,), num_proposed=1, num_accepted=MAX_INT), "2147483647 accepted of 1"),
    ],
)
async def test_a_commit_that_cannot_be_true_ends_its_stream(target: BadTarget, commit: Commit, reason: str) -> None:
    client = client_of(target)
    waiting = asyncio.create_task(outcome(client, request("a")))
    link, _ = await target.submitted()
    link.send(CommitRound((commit,)))  # type: ignore[attr-defined]
    said = await asyncio.wait_for(waiting, 10.0)
    assert reason in said
    assert "again" in said
    await asyncio.to_thread(target.mailbox.wait, 10.0)
    assert [event.message.aborts for event in target.mailbox.drain()] == [("a",)], "its target works on it no more"
    client.check_health()
    await client.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 4))])
async def test_no_message_of_a_target_ends_a_gateway(target: BadTarget, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cluster.transport.dialer.MAX_PAUSE_S", 0.001
    )  # else it waits longer and longer before it dials again
    monkeypatch.setattr("cluster.transport.dialer.FIRST_PAUSE_S", 0.001)
    client = client_of(target)
    ids: list[str] = []
    draws = Unsound(seed, ids, "d", VOCAB_SIZE)
    rng = random.Random(seed)
    for turn in range(40 if seed else 8):
        one = request(f"r{turn}")
        ids[:] = [one.id]
        waiting = asyncio.create_task(outcome(client, one))
        for _ in range(1000):
            if waiting.done():
                break
            for event in target.mailbox.drain():
                if isinstance(event, LinkUp):
                    link = event.link
            with suppress(OutriderError):
                link.send(draws.any_round() if rng.random() < 0.1 else draws.commit_round())
            await asyncio.sleep(0)
        said = await asyncio.wait_for(waiting, 10.0)
        assert isinstance(said, str) or all(0 <= token < VOCAB_SIZE for token in said)
        assert await asyncio.to_thread(client.wait_linked, 10.0), "it dials again who was unlinked"
    client.check_health()
    await client.close()


async def test_a_gateway_whose_thread_has_ended_says_so(target: BadTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(target)
    client.check_health()
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda failure: ended.set())
    monkeypatch.setattr(Dialer, "tick", lambda dialer, now_s: 1 / 0)
    target.close()  # the link that is lost wakes the thread
    assert await asyncio.to_thread(ended.wait, 10.0)
    for _ in range(1000):  # the hook runs before the thread has ended
        try:
            client.check_health()
        except LinkClosed as error:
            assert "has ended" in str(error)  # noqa: PT017
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it is healthy without its thread")


async def test_a_request_that_every_target_gives_up_is_sent_on_while_it_gets_tokens() -> None:
    """Else it may itself be what ends them."""
    targets = [BadTarget() for _ in range(4)]
    client = LinkClient("test", MODEL, [target.address for target in targets], _no_status)  # type: ignore[arg-type]
    assert client.wait_linked(10.0, len(targets))
    waiting = asyncio.create_task(outcome(client, request("a")))
    bases = []

    async def give_up(target: BadTarget) -> None:
        link, one = await target.submitted()
        bases.append(one.committed_len)
        tokens = (1,) if len(bases) < 3 else ()
        gone = Commit("a", one.committed_len + len(tokens), (), finish=FinishReason.ABORT, error="the target failed")
        commits = (Commit("a", one.committed_len, tokens), gone) if tokens else (gone,)
        link.send(CommitRound(commits))  # type: ignore[attr-defined]

    giving_up = [asyncio.create_task(give_up(target)) for target in targets]
    said = await asyncio.wait_for(waiting, 30.0)
    assert said == [1, 1]
    assert bases == [3, 4, 5]
    for task in giving_up:
        task.cancel()
    await asyncio.gather(*giving_up, return_exceptions=True)
    await client.close()
    for target in targets:
        target.close()
