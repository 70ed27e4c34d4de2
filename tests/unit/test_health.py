"""Health checks of the supervisor on one process."""

import asyncio
import time

import pytest

from actors import health
from tests.support.supervision import FAST, PretendedProcess


class PausedWith(PretendedProcess):
    """The first check finds it, and the supervisor, stopped for a while; later ones find it running."""

    num_checks = 0

    async def stalled_s(self) -> float:
        self.num_checks += 1
        if self.num_checks == 1:
            time.sleep(0.2)  # noqa: ASYNC251 - the machine is paused: nothing else runs either
            return 0.2
        return await super().stalled_s()


def test_a_check_during_which_the_supervisor_was_stopped_decides_nothing() -> None:
    async def run() -> None:
        process = PausedWith("drafter-0", "info")
        watching = asyncio.ensure_future(health.wait_failure(process, FAST, 1))
        while process.num_checks < 3:
            assert not watching.done(), watching.result()
            await asyncio.sleep(FAST.health_period_ms / 1e3)
        process.unread = 60.0
        assert await watching == "its loop has been stalled for 60.0 s"

    asyncio.run(run())


class StarvedWith(PretendedProcess):
    """It answers after a time in which the machine serves neither it nor the supervisor, but for moments."""

    num_answers = 0

    async def stalled_s(self) -> float:
        for _ in range(5):
            time.sleep(0.4 * FAST.health_timeout_ms / 1e3)  # noqa: ASYNC251 - nothing runs
            await asyncio.sleep(0)
        self.num_answers += 1
        return 1.9 * FAST.health_timeout_ms / 1e3


def test_time_in_which_the_supervisor_is_starved_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is silent and stalled for longer than it may be, in wall time."""
    monkeypatch.setattr(health, "SLICE_S", FAST.health_timeout_ms / 1e4)

    async def run() -> None:
        process = StarvedWith("router", "info")
        watching = asyncio.ensure_future(health.wait_failure(process, FAST, 1))
        while process.num_answers < 3:
            assert not watching.done(), watching.result()
            await asyncio.sleep(FAST.health_period_ms / 1e3)
        process.silent = True
        process.die("killed")
        assert await watching == "killed"

    asyncio.run(run())


def test_a_process_that_alone_is_silent_is_replaced() -> None:
    async def run() -> None:
        process = PretendedProcess("router", "info", silent=True)
        assert await health.wait_failure(process, FAST, 2) == "it did not answer within 0.1 s"

    asyncio.run(run())
