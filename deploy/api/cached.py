"""A short-lived cache of one asynchronous query."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Cached(Generic[T]):
    """Caches the result of ``ask`` for ``ttl_s``; errors are not cached. Concurrent callers share one query."""

    def __init__(self, ask: Callable[[], Awaitable[T]], ttl_s: float) -> None:
        self._ask = ask
        self._ttl_s = ttl_s
        self._query: asyncio.Task[T] | None = None
        self._cached_s = 0.0  # monotonic

    async def get(self) -> T:
        """Raises what ``ask`` raises. Cancelling a caller does not cancel the query."""
        if self._query is None or (self._query.done() and not self._is_fresh(self._query)):
            self._query = asyncio.create_task(self._answer())
            self._query.add_done_callback(_retrieve)
        return await asyncio.shield(self._query)

    def _is_fresh(self, query: "asyncio.Task[T]") -> bool:
        failed = query.cancelled() or query.exception() is not None
        return not failed and time.monotonic() < self._cached_s + self._ttl_s

    async def _answer(self) -> T:
        answer = await self._ask()
        self._cached_s = time.monotonic()
        return answer


def _retrieve(task: "asyncio.Task[T]") -> None:
    """Marks the exception as retrieved: asyncio would log it if no caller waits."""
    if not task.cancelled():
        task.exception()
