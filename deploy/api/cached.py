"""Caches an answer briefly; concurrent callers share one query."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Cached(Generic[T]):
    """Keeps what ``ask`` returns for ``ttl_s``; a failure is not kept. Callers that come while it runs share its outcome."""

    def __init__(self, ask: Callable[[], Awaitable[T]], ttl_s: float) -> None:
        self._ask = ask
        self._ttl_s = ttl_s
        self._asking: asyncio.Task[T] | None = None
        self._answered_s = 0.0  # monotonic

    async def get(self) -> T:
        """Raises what ``ask`` raises. A caller that is cancelled cancels nothing for the others."""
        if self._asking is None or (self._asking.done() and not self._is_fresh(self._asking)):
            self._asking = asyncio.create_task(self._answer())
            self._asking.add_done_callback(_retrieve)
        return await asyncio.shield(self._asking)

    def _is_fresh(self, asked: "asyncio.Task[T]") -> bool:
        failed = asked.cancelled() or asked.exception() is not None
        return not failed and time.monotonic() < self._answered_s + self._ttl_s

    async def _answer(self) -> T:
        answer = await self._ask()
        self._answered_s = time.monotonic()
        return answer


def _retrieve(task: "asyncio.Task[T]") -> None:
    """Marks the exception as retrieved, so that asyncio does not log it when no caller waits."""
    if not task.cancelled():
        task.exception()
