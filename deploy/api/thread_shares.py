"""Shares of the threads that encode and decode long texts."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

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
