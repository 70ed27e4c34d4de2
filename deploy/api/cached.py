"""A short-lived cache of one asynchronous query."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")


class Cached(Generic[T]):
    """Caches the result of ``ask`` for ``ttl_s``; errors are not cached. Concurrent callers share one query."""

    def __init__(self, ask: Callable[[], Awaitable[T]], ttl_s: float) -> None:
        self._ask = ask
        self._ttl_s = ttl_s
        self._query: asyncio.Task[T] | None = None
        self._fresh_until_s = 0.0  # monotonic

    async def get(self) -> T:
        """Raises what ``ask`` raises. Cancelling a caller does not cancel the query."""
        if self._query is None or (self._query.done() and time.monotonic() >= self._fresh_until_s):
            # In a context of its own: it belongs to no request, so its log lines carry no request's ids.
            self._query = asyncio.create_task(self._answer(), context=Context())
            # Retrieves the exception: asyncio would log it if no caller waits.
            self._query.add_done_callback(lambda query: query.cancelled() or query.exception())
        return await asyncio.shield(self._query)

    async def _answer(self) -> T:
        answer = await self._ask()
        self._fresh_until_s = time.monotonic() + self._ttl_s
        return answer
