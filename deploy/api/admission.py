"""Admission control: a limit on running sequences, and a bounded queue of calls."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from deploy.api.errors import overloaded
from deploy.api.settings import ApiSettings


class Admission:
    """FIFO. A call is admitted with all its sequences or not at all.

    Invariants: ``0 <= num_running <= max_concurrent``; the queue is empty or its head does not fit.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.num_running = 0

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    def is_busy(self, num_sequences: int) -> bool:
        """Whether a call would be queued now."""
        return bool(self._waiting) or not self._fits(num_sequences)

    @asynccontextmanager
    async def admitted(self, num_sequences: int) -> AsyncIterator[Callable[[], None]]:
        """Holds admission until the block ends or the yielded function is called. Raises ApiError (429): queue full."""
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
        if not self.is_busy(num_sequences):
            self.num_running += num_sequences
            return
        if len(self._waiting) >= self._settings.max_queued:
            message = f"{len(self._waiting)} calls are queued; try again later"
            raise overloaded(message, self._settings.retry_after_s, "queue_full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_sequences, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted at the moment of the cancellation: give it back
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
