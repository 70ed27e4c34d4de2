"""Targets that send gateways whatever they like: no gateway ends by it, and its callers are told."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pytest

from actors.gateway import LinkClient
from benchmarks.unsound import Unsound
from cluster.errors import LinkClosed, OutriderError
from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.transport import listen
from cluster.transport.base import LinkUp, Mailbox, Received
from cluster.transport.dialer import Dialer
from cluster.types import Commit, FinishReason, Prefill, Request
from tests.support.requests import a_request
from tests.support.toys import MODEL, VOCAB_SIZE

_NUMBERS = count()
MAX_INT = 2**31 - 1


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
