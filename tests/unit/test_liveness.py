"""Whether a process is well: long passes are told from hung ones, and nobody's question occupies it for good."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError

from actors import health, ray_pool
from actors.processes import Directory, ProcessEnded, ProcessUnavailable
from actors.ray_pool import BLOCKING, RayProcess
from actors.router import RouterActor
from actors.supervisor import Supervisor
from actors.worker import LoopActor, LoopThread
from cluster.config import Config, ObservabilityConfig
from engine import loop_status
from engine.factory import load_target
from engine.loop_status import PassProgress
from engine.mailbox import MonitoredMailbox
from router.cost_model import TableCost
from router.drafter.policies import build_policy
from router.drafter.router import Router
from router.plan import Span
from router.planning.planner import MAX_CHUNK_S, MIN_CHUNK_LEN, max_chunk_len
from tests.support.linked_loops import HandClock
from tests.support.requests import a_request


def test_a_pass_that_gets_further_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    passes = PassProgress(clock)
    monkeypatch.setattr("engine.mailbox.PASSES", passes)
    monkeypatch.setattr("engine.mailbox.time", SimpleNamespace(monotonic=clock))
    mailbox = MonitoredMailbox()
    clock.now_s = 40.0
    assert mailbox.stalled_s() == 40.0
    passes.advanced()  # a layer of the pass is done
    clock.now_s = 45.0
    assert mailbox.stalled_s() == 5.0
    clock.now_s = 90.0  # and then no other
    assert mailbox.stalled_s() == 50.0
    mailbox.drain()
    assert mailbox.stalled_s() == 0.0


def test_the_time_of_a_start_is_no_stall_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a router whose start took long would be replaced in its first slot, and the next one, too."""
    clock, may_end = HandClock(), threading.Event()
    memory = SimpleNamespace(
        recall=lambda policy: may_end.wait(60.0), save=lambda policy, now_s: None, close=lambda: None, fault=None
    )
    monkeypatch.setattr("actors.router.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("actors.router.open_store", lambda state, namespace: None)
    monkeypatch.setattr("actors.router.RouterMemory", lambda store, config: memory)
    config = Config(drafters=())
    targets = SimpleNamespace(reports=lambda deadline_s: [], publish=lambda table: None)
    router = RouterActor(config, Router(build_policy(config.router.policy), ()), targets, True)  # type: ignore[arg-type]
    clock.now_s = 20.0  # of imports, and a store that is slow to open
    router.start()
    assert router.stalled_s() == 0.0
    clock.now_s = 24.0
    assert router.stalled_s() == 4.0, "its first slot has not begun"
    may_end.set()
    router.stop()


def test_every_layer_of_a_pass_advances(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(tiny_model_folder, dtype="float32", kv_cache_bytes=2**22, max_model_len=64)
    seen: list[float] = []
    monkeypatch.setattr(loop_status.PASSES, "advanced", lambda: seen.append(0.0), raising=False)
    request = a_request(max_tokens=1)
    target.open(request, (1, 2, 3))
    target.execute([Span.bound("r", 0, (1, 2, 3))])
    assert len(seen) > target.model.config.num_layers
    target.release("r")


# What a pass computes.

SLOW = TableCost((1, 8, 64), (0.05, 0.2, 1.6), 1e-4)


@pytest.mark.parametrize("num_context", [0, 10_000, 10**6])
def test_a_prompts_chunk_adds_at_most_so_much_time_to_a_pass(num_context: int) -> None:
    """However long the pass takes anyway."""
    found = max_chunk_len(512, num_context, SLOW)
    assert found in (81, 82)  # 82 would add exactly two seconds
    assert SLOW.prefill_s(found, num_context) - SLOW.prefill_s(1, num_context) <= MAX_CHUNK_S + 1e-6


def test_a_chunk_has_some_tokens_on_the_slowest_target() -> None:
    assert max_chunk_len(512, 0, TableCost((1, 64), (1.0, 640.0))) == MIN_CHUNK_LEN


@pytest.mark.parametrize("num_tokens", [0, 5, 100])
def test_a_fast_target_computes_all_that_is_asked_for(num_tokens: int) -> None:
    assert max_chunk_len(num_tokens, 0, TableCost((1, 512), (0.001, 0.1))) == num_tokens


# Questions that wait.


def _wait(stop: threading.Event) -> None:
    stop.wait()


class Actor(LoopActor):
    def __init__(self) -> None:
        super().__init__(ObservabilityConfig())
        self.woken = threading.Event()

    def _start_loop(self) -> LoopThread:
        return LoopThread("looping", _wait, self.woken.set)


def test_waiting_for_the_end_ends_after_a_while() -> None:
    actor = Actor()
    assert actor.wait_end(0.01) is None  # it has not begun
    actor.start()
    assert actor.wait_end(0.01) is None
    actor.stop()
    assert actor.wait_end(10.0) == "stopped"


class FakeMethod:
    """``handle.method``: what is asked is noted, with its concurrency group."""

    def __init__(self, name: str, asked: list[tuple[str, str | None]], answers: list[Any], group: str | None = None) -> None:
        self._name, self._asked, self._answers, self._group = name, asked, answers, group

    def options(self, concurrency_group: str) -> "FakeMethod":
        return FakeMethod(self._name, self._asked, self._answers, concurrency_group)

    def remote(self, *args: Any) -> "asyncio.Future[Any]":
        self._asked.append((self._name, self._group))
        answer = asyncio.get_running_loop().create_future()
        given = self._answers.pop(0)
        answer.set_exception(given) if isinstance(given, Exception) else answer.set_result(given)
        return answer


async def test_the_end_is_asked_for_again_and_on_threads_of_its_own() -> None:
    asked: list[tuple[str, str | None]] = []
    handle = SimpleNamespace(
        wait_end=FakeMethod("wait_end", asked, [None, None, "stopped"]),
        start=FakeMethod("start", asked, ["ready"]),
        stalled_s=FakeMethod("stalled_s", asked, [0.5]),
    )
    process = RayProcess("target-0", handle)
    assert await process.ended() == "stopped"
    assert await process.call("start") == "ready"
    assert await process.stalled_s() == 0.5
    assert asked == [("wait_end", "wait_end")] * 3 + [("start", "start"), ("stalled_s", None)]
    assert {name for name, group in asked if group is not None} == set(BLOCKING)


async def test_a_lost_connection_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says so of a process that serves on: it must not be killed."""
    for module in (ray_pool, health):
        monkeypatch.setattr(module, "RETRY_S", 0.0)
    away, asked = ActorUnavailableError("connection reset", b"\0" * 16), list[tuple[str, str | None]]()
    handle = SimpleNamespace(
        wait_end=FakeMethod("wait_end", asked, [None, away, "stopped"]),
        stalled_s=FakeMethod("stalled_s", asked, [away, away, 0.5]),
        start=FakeMethod("start", asked, [away, "ready"]),
        report=FakeMethod("report", asked, [away]),
    )
    process = RayProcess("target-0", handle)
    assert await process.ended() == "stopped"
    assert await process.stalled_s() == 0.5
    assert await health.start(process, 10.0) == "ready"
    with pytest.raises(ProcessUnavailable, match="connection reset"):
        await process.call("report")


async def test_a_process_that_was_killed_for_memory_has_ended() -> None:
    """Ray's error is no RayActorError."""
    asked, killed = list[tuple[str, str | None]](), OutOfMemoryError("killed due to the node running low on memory")
    process = RayProcess(
        "target-0",
        SimpleNamespace(wait_end=FakeMethod("wait_end", asked, [killed]), report=FakeMethod("report", asked, [killed])),
    )
    assert "low on memory" in await process.ended()
    with pytest.raises(ProcessEnded, match="low on memory"):
        await process.call("report")


async def test_who_asks_where_the_targets_are_is_answered_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.supervisor.DIRECTORY_WAIT_S", 0.01)

    async def never(name: str) -> Any:
        await asyncio.get_running_loop().create_future()

    supervisor = Supervisor(Config(), SimpleNamespace(target=never, running=dict))  # type: ignore[arg-type]
    known = Directory("none")
    assert await asyncio.wait_for(supervisor.directory(known), 10.0) == known
    await supervisor.stop()


# ---- what a target's actor answers while it loads, and what it tells of where it is
