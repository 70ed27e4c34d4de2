"""A request that makes its targets fail ends with an error; those that were only there go on."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

import pytest

from actors import gateway
from actors.gateway import LinkClient
from actors.resumption import MAX_DEATHS
from cluster.client import ClusterStatus
from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.transport import listen
from cluster.transport.base import Link, Mailbox, Received
from cluster.types import Commit, FinishReason, Request
from tests.support.requests import a_request
from tests.support.supervision import eventually
from tests.support.toys import MODEL, VOCAB_SIZE

PROMPT = (1, 2)


class Target:
    """Commits what a test tells it to."""

    def __init__(self, number: int) -> None:
        self.name, self.address = f"target-{number}", f"memory://poison-{number}"
        self.submits: dict[str, Request] = {}
        self._mailbox, self._link = Mailbox(), list[Link]()
        self._hello = Hello(Role.TARGET, self.name, VOCAB_SIZE, "toy", instance=self.name)
        self._listener = listen(self.address, self._mailbox, self._hello)

    async def gets(self, *names: str) -> None:
        await eventually(lambda: self._read() == set(names))

    def _read(self) -> set[str]:
        for event in self._mailbox.drain():
            if isinstance(event, Received) and isinstance(event.message, SubmitRound):
                self._link = [event.link]
                self.submits |= {request.id: request for request in event.message.submits}
        return set(self.submits)

    def commit(self, name: str, token_ids: Sequence[int] = (), finish: FinishReason | None = None) -> None:
        base_len = self.submits[name].committed_len
        self._link[0].send(CommitRound((Commit(name, base_len, tuple(token_ids), finish=finish, error="of a test"),)))

    def commit_unsoundly(self, name: str) -> None:
        self._link[0].send(CommitRound((Commit(name, self.submits[name].committed_len + 1, (5,)),)))

    def die(self) -> None:
        self._listener.close()

    def reset(self, instance: str) -> None:
        """Its links break. It listens again, as the same process or as its successor."""
        self._listener.close()
        self._listener = listen(self.address, self._mailbox, replace(self._hello, instance=instance))

    def give_up(self) -> None:
        """As a target whose engine raises."""
        requests = [(name, one.committed_len) for name, one in self.submits.items()]
        self._link[0].send(
            CommitRound(tuple(Commit(n, length, (), finish=FinishReason.ABORT, error="it failed") for n, length in requests))
        )


class Cluster:
    def __init__(self) -> None:
        self.targets = [Target(number) for number in range(MAX_DEATHS + 1)]
        self.client = LinkClient("test", MODEL, [], _no_counts, resume_wait_s=60.0)
        self.answers: dict[str, list[Commit]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def link(self, number: int) -> Target:
        """To this target alone."""
        self.client.set_addresses([self.targets[number].address])
        assert await asyncio.to_thread(self.client.wait_linked, 10.0)
        return self.targets[number]

    def ask(self, *names: str) -> None:
        self._tasks += [asyncio.create_task(self._ask(name)) for name in names]

    async def _ask(self, name: str) -> None:
        commits = self.answers[name] = []
        async for commit in self.client.generate(a_request(name, PROMPT, max_tokens=9)):
            commits.append(commit)

    async def ended(self, name: str) -> Commit:
        await eventually(lambda: bool(self.answers[name]) and self.answers[name][-1].finish is not None)
        return self.answers[name][-1]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()
        for target in self.targets:
            target.die()


async def _no_counts() -> ClusterStatus:
    return ClusterStatus("toy", "fixed", 0, (), ())


def wait_for_links(monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> None:
    monkeypatch.setattr(gateway, "RELINK_S", deadline_s)


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    wait_for_links(monkeypatch, 0.5)
    monkeypatch.setattr("cluster.transport.dialer.MAX_PAUSE_S", 0.05)
    cluster = Cluster()
    await cluster.link(0)
    yield cluster
    await cluster.close()


async def fail(cluster: Cluster, numbers: Iterable[int], *names: str) -> None:
    """These targets fail in turn, before they commit anything."""
    for number in numbers:
        target = await cluster.link(number)
        await target.gets(*names)
        target.die()


@pytest.mark.parametrize("dies", [True, False])
async def test_a_request_ends_after_two_targets_that_failed_under_it_alone(cluster: Cluster, dies: bool) -> None:
    first, second = cluster.targets[:2]
    cluster.ask("poison")
    await first.gets("poison")
    first.commit("poison", [5])
    first.die()
    await cluster.link(1)
    await second.gets("poison")
    (second.die if dies else second.give_up)()
    last = await cluster.ended("poison")
    assert last.finish is FinishReason.ERROR
    assert "its targets were lost 2 times" in (last.error or "")
    assert last.base_len == len(PROMPT) + 1


@pytest.mark.parametrize("lives", [True, False])
async def test_a_target_whose_link_alone_was_lost_has_not_failed(
    cluster: Cluster, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that resets every connection takes two targets from a request between its tokens."""
    wait_for_links(monkeypatch, 10.0 if lives else 0.5)
    first, second = cluster.targets[:2]
    cluster.ask("unlucky")
    await first.gets("unlucky")
    first.die()
    await cluster.link(1)
    await second.gets("unlucky")
    second.submits.clear()
    second.reset(second.name if lives else "successor")
    if lives:
        await second.gets("unlucky")
        second.commit("unlucky", [5], FinishReason.LENGTH)
    assert (await cluster.ended("unlucky")).finish is (FinishReason.LENGTH if lives else FinishReason.ERROR)


@pytest.mark.parametrize("dies", [True, False])
async def test_resets_between_tokens_are_no_deaths(cluster: Cluster, dies: bool) -> None:
    """However many connections of two targets were reset, at most one of them has failed."""
    targets = cluster.targets[:2]
    cluster.client.set_addresses([target.address for target in targets])
    assert await asyncio.to_thread(cluster.client.wait_linked, 10.0, 2)
    cluster.ask("unlucky")
    for num_tokens in range(1, 2 * MAX_DEATHS + 1):
        await eventually(lambda: any("unlucky" in target._read() for target in targets))
        (holder,) = (target for target in targets if "unlucky" in target.submits)
        holder.commit("unlucky", [5])
        await eventually(lambda num_tokens=num_tokens: len(cluster.answers["unlucky"]) == num_tokens)  # type: ignore[misc]
        holder.submits.clear()
        if dies and num_tokens == 2 * MAX_DEATHS - 1:
            holder.die()
            targets.remove(holder)
        else:
            holder.reset(holder.name)
    await eventually(lambda: any("unlucky" in target._read() for target in targets))
    (holder,) = (target for target in targets if "unlucky" in target.submits)
    holder.commit("unlucky", [6], FinishReason.LENGTH)
    assert (await cluster.ended("unlucky")).finish is FinishReason.LENGTH


@pytest.mark.parametrize("names", [("poison",), ("poison", "the same again")])
async def test_requests_that_break_every_link_end(cluster: Cluster, names: Sequence[str]) -> None:
    first = cluster.targets[0]
    cluster.ask(*names)
    num_tries = 0
    while not all(cluster.answers.get(name) for name in names):
        await eventually(lambda: bool(first._read()) or all(cluster.answers.get(name) for name in names))
        if first.submits:
            num_tries += 1
            first.submits.clear()
            first.reset(first.name)
    assert 2 < num_tries <= 4 * MAX_DEATHS * len(names)
    for name in names:
        assert (await cluster.ended(name)).finish is FinishReason.ERROR


async def test_a_request_whose_commits_are_unsound_ends(cluster: Cluster) -> None:
    """A target whose link is dropped for such commits is linked again, as the same process."""
    first = cluster.targets[0]
    cluster.ask("unsound")
    for _ in range(2 * MAX_DEATHS):
        await first.gets("unsound")
        first.commit_unsoundly("unsound")
        first.submits.clear()
        first.reset(first.name)
    last = await cluster.ended("unsound")
    assert last.finish is FinishReason.ERROR
    assert f"lost {2 * MAX_DEATHS} times" in (last.error or "")


async def test_a_reset_of_the_last_link_is_no_evidence(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two targets failed under two requests. Of the one that is tried alone then, only the link is reset."""
    wait_for_links(monkeypatch, 10.0)
    cluster.ask("x", "y")
    await fail(cluster, [0, 1], "x", "y")
    third = await cluster.link(2)
    await eventually(lambda: len(third._read()) == 1)
    third.submits.clear()
    third.reset(third.name)
    for _ in range(2):
        await eventually(lambda: bool(third._read()))
        (name,) = third.submits
        third.commit(name, [5], FinishReason.LENGTH)
        third.submits.clear()
        assert (await cluster.ended(name)).finish is FinishReason.LENGTH


async def test_requests_that_get_tokens_of_the_next_target_go_on(cluster: Cluster) -> None:
    cluster.ask("poison", "bystander")
    await fail(cluster, [0], "poison", "bystander")
    second = await cluster.link(1)
    await second.gets("poison", "bystander")
    second.commit("bystander", [5])
    await eventually(lambda: bool(cluster.answers["bystander"]))
    second.die()
    assert (await cluster.ended("poison")).finish is FinishReason.ERROR
    third = await cluster.link(2)
    await third.gets("bystander")
    third.commit("bystander", [6], FinishReason.LENGTH)
    await cluster.ended("bystander")
    assert [commit.token_ids for commit in cluster.answers["bystander"]] == [(5,), (6,)]


async def test_requests_that_cannot_be_told_apart_are_tried_one_at_a_time(cluster: Cluster) -> None:
    names = {"a", "b", "c"}
    cluster.ask(*names)
    await fail(cluster, [0, 1], *names)
    third = await cluster.link(2)
    await eventually(lambda: len(third._read()) == 1)
    (harmless,) = third.submits
    third.commit(harmless, [5])
    await eventually(lambda: len(third._read()) == 2)
    poison = (set(third.submits) - {harmless}).pop()
    third.die()
    assert "were lost 3 times" in ((await cluster.ended(poison)).error or "")
    fourth = await cluster.link(3)
    await fourth.gets(*(names - {poison}))
    for name in names - {poison}:
        fourth.commit(name, [6], FinishReason.LENGTH)
        assert (await cluster.ended(name)).finish is FinishReason.LENGTH


async def test_one_that_gets_tokens_each_time_ends_in_the_end(cluster: Cluster) -> None:
    cluster.ask("late poison")
    for number in range(MAX_DEATHS):
        target = await cluster.link(number)
        await target.gets("late poison")
        target.commit("late poison", [number])
        await eventually(lambda number=number: len(cluster.answers["late poison"]) > number)  # type: ignore[misc]
        target.die()
    assert (await cluster.ended("late poison")).finish is FinishReason.ERROR


async def test_a_target_that_leaves_does_not_count(cluster: Cluster) -> None:
    cluster.ask("patient")
    cluster.client.set_leaving([target.name for target in cluster.targets[:-1]])
    await fail(cluster, range(MAX_DEATHS), "patient")
    last = await cluster.link(MAX_DEATHS)
    await last.gets("patient")
    last.commit("patient", [5], FinishReason.LENGTH)
    assert (await cluster.ended("patient")).finish is FinishReason.LENGTH


async def test_a_refusal_is_no_resumption(cluster: Cluster) -> None:
    cluster.ask("one")
    await fail(cluster, [0], "one")
    second = await cluster.link(1)
    await second.gets("one")
    assert second.submits["one"].was_admitted, "it may be refused for its own sake only"
    second.commit("one", finish=FinishReason.OVERLOADED)
    third = await cluster.link(2)
    await third.gets("one")
    assert (await cluster.client.status()).num_resumed == 0
    third.commit("one", [5], FinishReason.LENGTH)
    await cluster.ended("one")
    assert (await cluster.client.status()).num_resumed == 1
