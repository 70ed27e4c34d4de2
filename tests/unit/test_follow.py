"""How a replica of the API keeps up with where the targets are, whatever happens to the supervisor."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from actors.processes import Directory, ProcessEnded
from cluster.client import ClusterStatus
from cluster.config import Config, SupervisionConfig
from deploy import deployment, serve_app
from deploy.deployment import DeployedCluster
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


def killed_by(monkeypatch: pytest.MonkeyPatch, kill: Callable[[Any, bool], None]) -> None:
    monkeypatch.setattr(serve_app.ray, "kill", kill)


async def test_a_supervisor_that_hangs_is_killed_and_the_status_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = Hanging(4)
    supervisor, kills = SimpleNamespace(pids=pids), list[Any]()
    killed_by(monkeypatch, lambda actor, no_restart: kills.append((actor, no_restart)))
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

    killed_by(monkeypatch, killed)
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


def test_the_model_is_asked_about_as_its_device_computes_it() -> None:
    """`auto` may be another dtype on a GPU."""
    on_gpu, read = Config().changed(target={"device": "cuda"}), mock.Mock()
    given: dict[str, Any] = {"read_facts": read, "resolve_dtypes": lambda _: on_gpu}
    names = "ray read_inventory with_cores sampling_defaults resolve with_gpu_memory sized place make_groups as_made"
    given |= dict.fromkeys([*names.split(), "memory_budget", "cached_tokens", "Deployment"], mock.DEFAULT)
    with mock.patch.multiple(deployment, **given):
        DeployedCluster(Config(), Path(), owns_ray=True).reserve(Config(), Path())
    assert [call.args[0] for call in read.call_args_list] == [Config(), on_gpu]


# ---- what a new owner does with a deployment that runs: a replica of the deployment ``cluster``, or `outrider serve`


DIRECTORY = Directory("epoch", addresses=("grpc://node:1",))
AWAY = ActorUnavailableError("the supervisor restarts", b"\0" * 16)


class Found:
    """An owner beside a supervisor of the given source, whose answers a test scripts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, source: str, answers: list[Any], start_timeout_s: float = 60.0
    ) -> None:
        self.asked: list[dict[str, bool]] = []
        self.is_cleared = False
        self._answers = answers
        self.deployment = SimpleNamespace(source=source)
        supervisor = SimpleNamespace(
            deployment=SimpleNamespace(remote=lambda: "deployment"), ready=SimpleNamespace(remote=self._ask_ready)
        )
        monkeypatch.setattr(deployment, "NODES_POLL_S", 0.0)
        monkeypatch.setattr("ray.get", self._get)
        config = Config(supervision=SupervisionConfig(start_timeout_s=start_timeout_s))
        owner: Any = SimpleNamespace(
            _config=config, _source="this file", _found_supervisor=lambda: supervisor, clear=self._clear
        )
        self.result: Any = DeployedCluster.find(owner)

    def _ask_ready(self, every: bool) -> str:
        self.asked.append({"every": every})
        return "ready"

    def _get(self, what: str, timeout: float) -> Any:
        assert timeout
        answer = self.deployment if what == "deployment" else self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _clear(self) -> None:
        self.is_cleared = True


def test_a_supervisor_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its targets serve on: they must not be ended because it is away, or because one of them still loads."""
    no_gcs = RayTaskError("ready", "the GCS is away", ConnectionError("the GCS is away"))
    found = Found(monkeypatch, "this file", [AWAY, GetTimeoutError("not ready"), no_gcs, DIRECTORY])
    assert found.result == (found.deployment, DIRECTORY)
    assert found.asked == [{"every": False}] * 4
    assert not found.is_cleared


@pytest.mark.parametrize(
    ("source", "answers", "start_timeout_s"),
    [
        ("another file", [], 60.0),
        ("this file", [RayTaskError("ready", "no target started", ProcessEnded("no memory"))], 60.0),
        ("this file", [AWAY], 1e-9),
    ],
)
def test_a_deployment_that_cannot_serve_is_ended(
    source: str, answers: list[Any], start_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found(monkeypatch, source, answers, start_timeout_s)
    assert found.result is None
    assert found.is_cleared
