"""Calls of the supervisor on one process, with deadlines: start, health checks, and short questions."""

import asyncio
import logging
import math
from typing import Any

from actors.processes import Process, ProcessEnded
from cluster.config import SupervisionConfig

logger = logging.getLogger(__name__)


async def start(process: Process, timeout_s: float) -> Any:
    """Starts the process, which loads its model. Raises ProcessEnded if it ended, or was not ready in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await process.call("start")
    except TimeoutError as late:
        raise ProcessEnded(f"it was not ready after {timeout_s:g} s (supervision.start_timeout_s)") from late


async def wait_failure(process: Process, config: SupervisionConfig, timeout_factor: int) -> str:
    """Returns why the process must be replaced: it ended, does not answer, or its loop is stalled.

    A check in which this process itself was stopped (a paused machine, SIGSTOP of the whole cluster) decides nothing: the
    other process was stopped with it, and has not run since.
    """
    period_s = config.health_period_ms / 1e3
    timeout_s = config.health_timeout_ms * timeout_factor / 1e3
    ended = asyncio.ensure_future(process.ended())
    answer: asyncio.Future[float] | None = None
    clock = asyncio.get_running_loop().time
    try:
        while True:
            began_s = clock()
            await asyncio.wait({ended}, timeout=period_s)
            # One rank may hang while another ends because of it.
            answer = asyncio.ensure_future(process.stalled_s())
            await asyncio.wait({ended, answer}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            if (took_s := clock() - began_s) > period_s + 2 * timeout_s:
                logger.warning("a health check took %.1f s: the supervisor was stopped meanwhile, and checks again", took_s)
                _discard(answer)
            elif not answer.done():
                return f"it did not answer within {timeout_s:g} s"
            elif (stalled_s := answer.result()) > timeout_s:
                return f"its loop has been stalled for {stalled_s:.1f} s"
    finally:
        ended.cancel()
        if answer is not None:
            _discard(answer)


def _discard(answer: asyncio.Future[float]) -> None:
    if not answer.cancel():
        answer.exception()  # of a process that has ended: retrieved, so that asyncio does not log it


async def ask(process: Process, config: SupervisionConfig, method: str, *args: Any, deadline_s: float = math.inf) -> Any:
    """The answer, or None from a process that is dead or does not answer; ``wait_failure`` handles that case."""
    timeout_s = min(deadline_s, config.health_timeout_ms / 1e3)
    try:
        async with asyncio.timeout(timeout_s):
            return await process.call(method, *args)
    except (ProcessEnded, TimeoutError) as unanswered:
        logger.warning("no answer to %s: %s", method, str(unanswered) or f"within {timeout_s:g} s")
        return None
