"""What a supervisor asks of one process, with deadlines: to start, to say that it lives, and small questions."""

import asyncio
import logging
import math
from typing import Any

from actors.processes import Process, ProcessEnded
from cluster.config import SupervisionConfig

logger = logging.getLogger(__name__)


async def started(process: Process, timeout_s: float) -> Any:
    """What it tells of itself when it is ready. Models are loaded meanwhile.

    Raises:
        ProcessEnded: it ended before, or was too late.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await process.call("start")
    except TimeoutError as late:
        raise ProcessEnded(f"it was not ready after {timeout_s:g} s (supervision.start_timeout_s)") from late


async def watched(process: Process, config: SupervisionConfig, patience: int) -> str:
    """Returns why the process must be replaced. Death is told at once; silence is found by asking."""
    timeout_s = config.health_timeout_ms * patience / 1e3
    ended = asyncio.ensure_future(process.ended())
    try:
        while True:
            done, _ = await asyncio.wait({ended}, timeout=config.health_period_ms / 1e3)
            if done:
                return ended.result()
            try:
                # Not `wait_for`, which in Python 3.11 loses a cancellation that meets the answer: `stop` would hang.
                async with asyncio.timeout(timeout_s):
                    unread_s = await process.unread_s()
            except TimeoutError:
                return f"it did not answer within {timeout_s:g} s"
            if unread_s > timeout_s:
                return f"it has not read its mail for {unread_s:.1f} s"
    finally:
        ended.cancel()


async def ask(process: Process, config: SupervisionConfig, method: str, *args: Any, deadline_s: float = math.inf) -> Any:
    """The answer, or None of a process that is dead or silent: whoever watches it sees to that."""
    timeout_s = min(deadline_s, config.health_timeout_ms / 1e3)
    try:
        async with asyncio.timeout(timeout_s):
            return await process.call(method, *args)
    except (ProcessEnded, TimeoutError) as unanswered:
        logger.warning("no answer to %s: %s", method, str(unanswered) or f"within {timeout_s:g} s")
        return None
