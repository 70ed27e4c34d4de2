"""What a new owner does with a deployment that runs: a replica of the deployment ``cluster``, or `outrider serve`."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayTaskError

from actors.processes import Directory, ProcessEnded
from cluster.config import Config, SupervisionConfig
from deploy import deployment
from deploy.deployment import DeployedCluster

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
