"""How a replica of the API keeps up with where the targets are, whatever happens to the supervisor."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.processes import Directory
from deploy import serve_app

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
