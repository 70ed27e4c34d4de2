"""The whole cluster as threads of one process, on toys: what the loops and the client do beside the simulation."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from actors.gateway import LinkClient
from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import DrafterConfig, DraftLengthConfig, NgramOptions
from cluster.errors import LinkClosed, RankLost
from cluster.transport.base import Mailbox
from cluster.types import Commit, FinishReason, Request
from drafters.sessions import SessionLimits
from engine.round import TargetLoop
from router.cost_model import TableCost
from router.plan import Span
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.requests import a_request
from tests.support.toys import MODEL, ToyDrafter, ToyTarget, plain_run

COST = TableCost((1, 32), (0.02, 0.03))
MAX_HOLD_S = 10.0


def request(i: int, max_tokens: int = 20, **parameters: Any) -> Request:
    return a_request(
        f"r{i}",
        (1, 2, i % 12),
        max_tokens=max_tokens,
        temperature=1.0,
        seed=i,
        ignore_eos=True,
        **parameters,
        arrival_s=float(i),
    )


def drafter(error: float = 0.2) -> PoolEntry:
    return PoolEntry(ToyDrafter(random.Random(1), error=error, silence=0.0))


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    """It awaits and verifies all drafts although a toy's pass takes no longer than a draft, and on a busy machine less."""
    pool, planner = {"a": drafter(), "b": drafter(0.9)}, StepPlanner(PlannerSettings("all", MAX_HOLD_S, overlap="barrier"))
    with EmbeddedCluster(
        ToyTarget(num_blocks=64), MODEL, COST, pool, planner, draft_length=DraftLengthConfig(kind="fixed")
    ) as running:
        yield running


def test_a_pool_without_a_configuration_has_its_defaults() -> None:
    entry, limits = drafter(), SessionLimits()
    config = DrafterConfig(name="d", options=NgramOptions())
    assert entry.capacity == limits.capacity == config.capacity
    assert entry.max_draft_len == limits.max_draft_len == config.max_draft_len


def test_many_requests_at_once_get_the_plain_tokens(cluster: EmbeddedCluster) -> None:
    requests = [request(i) for i in range(30)]
    completions = cluster.complete(requests)
    assert [tuple(c.token_ids) for c in completions] == [plain_run(r) for r in requests]
    assert sum(c.num_accepted for c in completions) > 0
    assert all(c.commits[-1].finish is FinishReason.LENGTH for c in completions)


def test_the_round_counts_what_becomes_of_drafts(cluster: EmbeddedCluster) -> None:
    """The counts by length and position agree with the totals."""
    cluster.complete([request(i, max_tokens=40) for i in range(8)])
    telemetry = cluster.loop.telemetry
    for name in ("a", "b"):
        stats = telemetry.drafter(name)
        counts = stats.counts()
        assert sum(counts.verified_at) == stats.num_proposed > 0
        assert sum(counts.accepted_at) == stats.num_accepted > 0
        assert sum(counts.verified) == sum(counts.accepted)
        assert sum(counts.drafted) > 0
        assert sum(counts.reply_s.counts) > 0
        assert counts.acceptance is not None
    rounds, rows, batch = telemetry.rounds_s.snapshot(), telemetry.rows.snapshot(), telemetry.batch.snapshot()
    assert sum(rounds.counts) == sum(rows.counts) == sum(batch.counts) == telemetry.num_passes
    assert rows.total == telemetry.num_rows


def test_a_killed_drafter_changes_no_token_and_its_successor_drafts_again(cluster: EmbeddedCluster) -> None:
    requests = [request(i, max_tokens=60) for i in range(8)]
    killed: list[str] = []

    async def run() -> list[list[int]]:
        async def one(index: int) -> list[int]:
            token_ids: list[int] = []
            async for commit in cluster.client.generate(requests[index]):
                token_ids.extend(commit.token_ids)
                if index == 0 and len(token_ids) > 10 and not killed:
                    killed.append("a")
                    cluster.kill_drafter("a")
            return token_ids

        return list(await asyncio.gather(*(one(i) for i in range(len(requests)))))

    assert [tuple(ids) for ids in asyncio.run(run())] == [plain_run(r) for r in requests]
    cluster.start_drafter("a", drafter(0.0))
    before = cluster.loop.telemetry.drafter("a").num_accepted
    again = [request(i + 100) for i in range(8)]
    assert [tuple(c.token_ids) for c in cluster.complete(again)] == [plain_run(r) for r in again]
    assert cluster.loop.telemetry.drafter("a").num_accepted > before


class _Held(ToyTarget):
    """Its first pass lasts until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        assert self.goes_on.wait(30.0)
        return super().execute(spans)


def test_who_waits_for_a_cluster_that_hangs_up_hears_so() -> None:
    engine = _Held()
    with EmbeddedCluster(engine, MODEL, COST, {}) as cluster:
        completing = cluster.begin([request(1)])
        cluster.hang_up()
        with pytest.raises(LinkClosed):
            completing.ended.result(30.0)
        engine.goes_on.set()


def test_places_that_fall_free_are_taken_in_order(cluster: EmbeddedCluster) -> None:
    requests = [request(i, max_tokens=12 + 20 * (i == 0)) for i in range(6)]
    completions = cluster.complete(requests, num_alive=2)
    assert [tuple(c.token_ids) for c in completions] == [plain_run(r) for r in requests]


def test_closing_the_iterator_aborts_the_request(cluster: EmbeddedCluster) -> None:
    async def run() -> None:
        stream = cluster.client.generate(request(1, max_tokens=80))
        await anext(stream)
        await stream.aclose()
        # What is sent later on the same link is read later: once this one is served, the abort has been read.
        async for _ in cluster.client.generate(request(2, max_tokens=2)):
            pass
        status = await cluster.client.status()
        assert status.targets[0].num_running == 0
        assert status.targets[0].num_free_blocks == status.targets[0].num_blocks

    asyncio.run(run())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (a_request("x", (), max_tokens=1), "prompt has 0 tokens"),
        (a_request("x", (1,) * 96, max_tokens=1), "prompt has 96 tokens"),
        (a_request("x", (99,), max_tokens=1), "outside the vocabulary"),
    ],
)
def test_what_slips_past_the_gateway_ends_with_an_error(cluster: EmbeddedCluster, bad: Request, reason: str) -> None:
    (completion,) = cluster.complete([bad])
    (commit,) = completion.commits
    assert commit.finish is FinishReason.ERROR
    assert reason in (commit.error or "")


def test_a_draining_target_refuses_and_finishes(cluster: EmbeddedCluster) -> None:
    async def run() -> None:
        stream = cluster.client.generate(request(1))
        commits = [await anext(stream)]
        cluster.loop.drain()
        with pytest.raises(LinkClosed, match="drains"):
            await anext(cluster.client.generate(request(2)))
        commits.extend([commit async for commit in stream])
        assert tuple(t for c in commits for t in c.token_ids) == plain_run(request(1))

    asyncio.run(run())


class _FailingTarget(ToyTarget):
    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        raise FloatingPointError("the device is gone")


def test_a_failing_engine_ends_its_streams_with_the_reason() -> None:
    cluster = EmbeddedCluster(_FailingTarget(), MODEL, COST, {})

    async def first() -> Commit:
        return await anext(cluster.client.generate(request(1)))

    with pytest.raises(LinkClosed, match=r"the device is gone; send the request again|the target is gone"):
        asyncio.run(first())  # the link may go before the commit is read
    with pytest.raises(RuntimeError, match="the device is gone"):
        cluster.close()


class _LosingTarget(ToyTarget):
    is_lost = False

    def check_integrity(self) -> None:
        if self.is_lost:
            raise RankLost("rank 1 ended")
        super().check_integrity()


def test_an_idle_engine_that_can_compute_no_more_ends_the_loop() -> None:
    engine, stop = _LosingTarget(), threading.Event()
    loop = TargetLoop(engine, MODEL, Mailbox(), COST, time.monotonic)
    engine.is_lost = True
    with pytest.raises(RankLost, match="rank 1 ended"):
        loop.run(stop)


def test_a_request_that_one_target_refuses_goes_to_another() -> None:
    async def run(client: LinkClient, other: EmbeddedCluster) -> None:
        for i in range(4):
            wanted = request(i, max_tokens=5)
            commits = [commit async for commit in client.generate(wanted)]
            assert tuple(t for c in commits for t in c.token_ids) == plain_run(wanted)
        other.loop.drain()
        with pytest.raises(LinkClosed, match="drains"):
            await anext(client.generate(request(9)))
        await client.close()

    with EmbeddedCluster(ToyTarget(), MODEL, COST, {}) as drained, EmbeddedCluster(ToyTarget(), MODEL, COST, {}) as other:
        drained.loop.drain()
        client = LinkClient("both", MODEL, [drained.address, other.address], drained.client.status)
        assert client.wait_linked(10.0, num_targets=2)
        asyncio.run(run(client, other))
