"""Calls of the supervisor on one process, with deadlines: start, health checks, and short questions."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from actors.processes import Process, ProcessEnded, ProcessUnavailable
from cluster.config import SupervisionConfig

logger = logging.getLogger(__name__)

PERIOD_S = 0.5  # between checks, or less where the time-out is short
SLICE_S = 0.25  # of a wait: the resolution at which the supervisor notices that it did not run
RETRY_S = 1.0  # after a lost connection
NOTED_S = 1.0  # a check during which it did not run for so long is logged
MAX_EXCUSED = 3  # time-outs in a row that pauses of the supervisor excuse; a long pause counts as one


async def start(process: Process, timeout_s: float) -> Any:
    """Starts the process, which loads its model, or has done so for an earlier supervisor. Raises ProcessEnded if it ended,
    or was not ready in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await process.call("start")
                except ProcessUnavailable as error:
                    logger.warning("the connection to %s was lost while it starts; asking it again: %s", process.name, error)
                    await asyncio.sleep(RETRY_S)
    except TimeoutError as late:
        raise ProcessEnded(f"it was not ready after {timeout_s:g} s (supervision.start_timeout_s)") from late


async def never() -> bool:
    """Of a supervisor without a head."""
    return False


async def wait_failure(
    process: Process, config: SupervisionConfig, timeout_factor: int, is_cut_off: Callable[[], Awaitable[bool]] = never
) -> str:
    """Returns why the process must be replaced: it ended, does not answer, or its loop is stalled. ``is_cut_off``: whether
    the head of the cluster is out of reach; then silence says nothing, and no process could be started.

    Time in which this process itself did not run (a paused or starved machine, SIGSTOP of the whole cluster) does not count:
    the other process has probably not run either. It does not count for a process on another machine either, although that
    one may have run: there a failure is found later by that time. A process that does not run while this one does is
    replaced, and so is one that is not well after MAX_EXCUSED time-outs of such time: else a busy machine would spare a
    process that hangs.
    """
    timeout_s = config.health_timeout_ms * timeout_factor / 1e3
    period_s = min(PERIOD_S, config.health_timeout_ms / 6e3)
    ended = asyncio.ensure_future(process.ended())
    answer: asyncio.Future[float] | None = None
    clock = asyncio.get_running_loop().time
    excuses, outage = _Excuses(timeout_s), _Outage(MAX_EXCUSED * config.health_timeout_ms / 1e3)
    try:
        while True:
            lost_s = await _wait({ended}, period_s, excuses)
            # One rank may hang while another ends because of it.
            answer, asked_s = asyncio.ensure_future(process.stalled_s()), clock()
            lost_s += await _wait({ended, answer}, timeout_s, excuses)
            cut_off = not (ended.done() or answer.done()) and await is_cut_off()
            if ended.done():
                return ended.result()
            if lost_s > NOTED_S:
                logger.warning("the supervisor did not run for %.1f s of a health check, which do not count", lost_s)
            if not answer.done():
                if not outage.excuses(cut_off, asked_s, clock()):
                    return f"it did not answer within {timeout_s:g} s"
                _discard(answer)
                continue
            if (stalled_s := answer.result()) > timeout_s + lost_s:
                return f"its loop has been stalled for {stalled_s:.1f} s"
            if stalled_s <= timeout_s:
                excuses, outage = _Excuses(timeout_s), _Outage(MAX_EXCUSED * config.health_timeout_ms / 1e3)
    finally:
        ended.cancel()
        if answer is not None:
            _discard(answer)


class _Excuses:
    """Of one process, since it was last well."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._left_s = MAX_EXCUSED * timeout_s

    def take(self, late_s: float) -> float:
        """Returns how much of a pause of this process does not count: all or nothing. A pause of the whole machine is one,
        however long; many short ones in a row are a busy machine, on which the other process should run as well."""
        if self._left_s <= 0:
            return 0.0
        self._left_s -= min(late_s, self._timeout_s)
        return late_s


class _Outage:
    """Time without the head, as the checks of one process met it since that was last well. It excuses silence, and silence
    afterwards for as long, but at most ``most_s``: connections need about that to find each other."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since_s: float | None = None
        self._until_s = 0.0

    def excuses(self, is_cut_off: bool, asked_s: float, now_s: float) -> bool:
        if is_cut_off:
            self._since_s = asked_s if self._since_s is None else self._since_s
            return True
        if self._since_s is not None:
            self._until_s = now_s + min(self._most_s, now_s - self._since_s)
            self._since_s = None
        return now_s < self._until_s


async def _wait(futures: Collection[asyncio.Future[Any]], timeout_s: float, excuses: _Excuses) -> float:
    """Waits for the first of them, at most ``timeout_s`` and the time that ``excuses`` allow. Returns that time: seconds by
    which the slices of the wait ended late."""
    clock = asyncio.get_running_loop().time
    left_s, lost_s, done = timeout_s, 0.0, set[asyncio.Future[Any]]()
    while left_s > 0 and not done:
        slice_s, began_s = min(SLICE_S, left_s), clock()
        done, _ = await asyncio.wait(futures, timeout=slice_s, return_when=asyncio.FIRST_COMPLETED)
        late_s = max(0.0, clock() - began_s - slice_s)
        excused_s = excuses.take(late_s)
        left_s -= slice_s + late_s - excused_s
        lost_s += excused_s
    return lost_s


def _discard(answer: asyncio.Future[float]) -> None:
    if not answer.cancel():
        answer.exception()  # of a process that has ended: retrieved, so that asyncio does not log it


async def ask(
    process: Process | None, config: SupervisionConfig, method: str, *args: Any, deadline_s: float = math.inf
) -> Any:
    """The answer, or None from a process that is dead or does not answer, which ``wait_failure`` handles, and from none."""
    if process is None:
        return None
    timeout_s = min(deadline_s, config.health_timeout_ms / 1e3)
    try:
        async with asyncio.timeout(timeout_s):
            return await process.call(method, *args)
    except (ProcessEnded, TimeoutError) as unanswered:
        reason = str(unanswered) or f"it took longer than {timeout_s:g} s"
        logger.warning("%s did not answer the call %r: %s", process.name, method, reason)
        return None
