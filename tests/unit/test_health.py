"""Health checks of the supervisor on one process."""

import asyncio
import time

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
