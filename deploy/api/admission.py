"""Who may run now: a bounded number of sequences, and a bounded queue before them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from deploy.api.errors import overloaded
from deploy.api.settings import ApiSettings


class Admission:
    """First come, first served; a call enters with all of its sequences or not at all.

    Invariants: ``0 <= num_running <= max_concurrent``; nobody waits while the first in the queue would fit.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.num_running = 0

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, num_sequences: int) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn and hold it, until the block ends or what it yields is called. The caller bounds the wait.

        Raises:
            ApiError: 429, the queue is full.
        """
        await self._enter(num_sequences)
        held = num_sequences

        def end() -> None:
            nonlocal held
            self.num_running -= held
            held = 0
            self._admit()

        try:
            yield end
        finally:
            end()

    async def _enter(self, num_sequences: int) -> None:
        if not self._waiting and self._fits(num_sequences):
            self.num_running += num_sequences
            return
        if len(self._waiting) >= self._settings.max_queued:
            raise overloaded(
                f"{len(self._waiting)} calls wait already; try again later", self._settings.retry_after_s, "queue_full"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_sequences, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came in the same moment: pass it on
                self.num_running -= num_sequences
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            num_sequences, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self.num_running += num_sequences
            turn.set_result(None)

    def _fits(self, num_sequences: int) -> bool:
        return self.num_running + num_sequences <= self._settings.max_concurrent
