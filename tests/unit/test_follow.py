"""How a replica of the API keeps up with where the targets are, whatever happens to the supervisor."""

import asyncio
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.processes import Directory
from cluster.client import ClusterStatus
from cluster.config import SupervisionConfig
from deploy import serve_app
from tests.support.supervision import eventually

OLD = Directory("first life", 3, addresses=("grpc://node:1",))
NEW = Directory("second life", 1, addresses=("grpc://node:2",))


class Answers:
    """``supervisor.directory.remote``: these answers, one after the other, then none."""

    def __init__(self, *answers: Directory | Exception) -> None:
        self._answers = list(answers)
        self.known: list[Directory] = []

    async def remote(self, known: Directory) -> Directory:
        self.known.append(known)
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("failure", [RayError("gone"), KeyError("a mistake")])
async def test_addresses_are_followed_through_failures(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve_app, "RETRY_S", 0.0)
    wanted: asyncio.Queue[Any] = asyncio.Queue()
    answers = Answers(failure, NEW)
    client: Any = SimpleNamespace(set_addresses=wanted.put_nowait, set_leaving=lambda names: None)
    with caplog.at_level(logging.WARNING):
        following = asyncio.create_task(serve_app.follow_targets(client, SimpleNamespace(directory=answers), OLD))
        assert await asyncio.wait_for(wanted.get(), 10) == NEW.addresses
        await asyncio.sleep(0)
    assert answers.known == [OLD, OLD, NEW]
    assert "known targets stay in use" in caplog.text
    following.cancel()


QUICK = SupervisionConfig(health_timeout_ms=2)
STATUS = ClusterStatus("toy", "fixed", 0, (), (), notes=("another",))


class Hanging:
    """``supervisor.pids.remote``: the first calls are never answered."""

    def __init__(self, num_unanswered: int) -> None:
        self.num_unanswered, self.num_asked = num_unanswered, 0

    async def remote(self) -> dict[str, int]:
        self.num_asked += 1
        if self.num_asked <= self.num_unanswered:
            await asyncio.Event().wait()
        if self.num_asked == self.num_unanswered + 1:
            raise RayError("it is being restarted")
        return {}


async def test_a_supervisor_that_hangs_is_killed_and_the_status_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = Hanging(4)
    supervisor, kills = SimpleNamespace(pids=pids), list[Any]()
    monkeypatch.setattr(serve_app.ray, "kill", lambda actor, no_restart: kills.append((actor, no_restart)))
    watch = serve_app.SupervisorWatch(supervisor, QUICK, lambda: True)
    assert watch.noted(STATUS) is STATUS
    watching = asyncio.create_task(watch.run())
    await eventually(lambda: pids.num_asked > 7)
    watching.cancel()
    assert kills == [(supervisor, False)] * 2
    status = watch.noted(STATUS)
    assert status.num_supervisor_kills == 2
    assert status.notes[0] == "another"
    assert "killed, 2 times" in status.notes[1]


async def test_a_supervisor_is_killed_only_by_the_replica_on_duty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duty moves with the first kill: had both watched, the second would have killed as well."""
    on_duty, killers = "first", list[str]()
    supervisor = SimpleNamespace(pids=Hanging(10**9))

    def killed(actor: object, no_restart: bool) -> None:
        nonlocal on_duty
        killers.append(on_duty)
        on_duty = "second"

    monkeypatch.setattr(serve_app.ray, "kill", killed)
    watches = {
        name: serve_app.SupervisorWatch(supervisor, QUICK, partial(lambda name: name == on_duty, name))
        for name in ("first", "second")
    }
    watching = [asyncio.create_task(watch.run()) for watch in watches.values()]
    await eventually(lambda: len(killers) == 3)
    for task in watching:
        task.cancel()
    assert killers == ["first", "second", "second"]
    assert [watch.noted(STATUS).num_supervisor_kills for watch in watches.values()] == [1, 2]
