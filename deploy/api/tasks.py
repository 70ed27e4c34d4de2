"""Tasks: beside a block of code, shared by callers, until a client disconnects, or within a tenant's share of threads."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from deploy.api.errors import ClientGone


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs ``work`` as a task within the block. At the block's end it is cancelled; an exception that ended it before is
    raised."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()


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


# A quarter of those of asyncio's default executor, whose queue is FIFO.
THREADS_PER_TENANT = max(1, min(32, (os.cpu_count() or 1) + 4) // 4)


class ThreadShares:
    """``is_shared``: whether there are several tenants; else one may use all threads."""

    def __init__(self, num_threads: int = THREADS_PER_TENANT) -> None:
        self._free = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(num_threads))  # by tenant
        self.is_shared = False

    async def run(self, tenant: str, work: Callable[[], Awaitable[T]]) -> T:
        """Waits for a thread of the tenant's share. Cancelled, it gives the thread back when ``work`` has ended: threads
        cannot be cancelled."""
        if not self.is_shared:
            return await work()
        free = self._free[tenant]
        await free.acquire()
        working = asyncio.ensure_future(work())

        def end(ended: asyncio.Future[T]) -> None:
            free.release()
            if not ended.cancelled():
                ended.exception()  # asyncio would log it if no caller waits

        working.add_done_callback(end)
        return await asyncio.shield(working)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits ``work``; cancels it and raises ClientGone when the client disconnects. The body has been read."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
