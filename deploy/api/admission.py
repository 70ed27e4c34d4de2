"""Admission control: a limit on running sequences, and a bounded queue of calls that tenants share fairly."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deploy.api.errors import overloaded
from deploy.api.settings import ApiSettings
from router.fair_share import TokenCounters


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    num_sequences: int
    num_prompt_tokens: int
    turn: asyncio.Future[None]


class Admission:
    """Fair among tenants, FIFO within one. A call is admitted with all its sequences or not at all.

    A full queue refuses the newest call of the tenant that has the most in it.

    Invariants: ``0 <= num_running <= max_concurrent``; the queue is empty or its next call does not fit.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._waiting: dict[str, deque[_Waiting]] = {}  # by tenant, none empty
        self._counters = TokenCounters()
        self.num_running = 0

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_busy(self, num_sequences: int) -> bool:
        """Whether a call would be queued now."""
        return bool(self._waiting) or not self._fits(num_sequences)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """For tokens generated for ``tenant``."""
        self._counters.charge(tenant, num_tokens)

    @asynccontextmanager
    async def admitted(
        self, num_sequences: int, tenant: str = "", num_prompt_tokens: int = 1
    ) -> AsyncIterator[Callable[[], None]]:
        """Holds admission until the block ends or the yielded function is called. Raises ApiError (429): queue full.

        Args:
            num_prompt_tokens: charged to ``tenant`` on admission.
        """
        await self._enter(tenant, _Waiting(num_sequences, num_prompt_tokens, asyncio.get_running_loop().create_future()))
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

    async def _enter(self, tenant: str, call: _Waiting) -> None:
        is_busy = self.is_busy(call.num_sequences)
        if is_busy and self.num_queued >= self._settings.max_queued:
            self._displace(tenant)
        self._counters.arrive(tenant, self._waiting)
        if not is_busy:
            self._start(tenant, call)
            return
        self._waiting.setdefault(tenant, deque()).append(call)
        try:
            await call.turn
        except asyncio.CancelledError:
            if not call.turn.cancelled():  # decided at the moment of the cancellation: give it back if admitted
                self.num_running -= call.num_sequences if call.turn.exception() is None else 0
            elif call in self._waiting.get(tenant, ()):
                self._remove(tenant, call)
            self._admit()
            raise

    def _displace(self, tenant: str) -> None:
        """Makes room for a call of ``tenant``. Raises ApiError (429): no other has more than one call more in the queue."""
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
        refusal = overloaded(
            f"{self.num_queued} calls are queued; try again later", self._settings.retry_after_s, "queue_full"
        )
        if len(self._waiting.get(longest, ())) <= len(self._waiting.get(tenant, ())) + 1:
            raise refusal
        newest = self._waiting[longest][-1]
        self._remove(longest, newest)
        if not newest.turn.cancelled():
            newest.turn.set_exception(refusal)

    def _admit(self) -> None:
        while self._waiting:
            tenant = self._counters.next_of(self._waiting)
            call = self._waiting[tenant][0]
            if not self._fits(call.num_sequences):
                return
            self._remove(tenant, call)
            if not call.turn.cancelled():
                self._start(tenant, call)
                call.turn.set_result(None)

    def _start(self, tenant: str, call: _Waiting) -> None:
        self.num_running += call.num_sequences
        self._counters.charge(tenant, call.num_prompt_tokens)

    def _remove(self, tenant: str, call: _Waiting) -> None:
        self._waiting[tenant].remove(call)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _fits(self, num_sequences: int) -> bool:
        return self.num_running + num_sequences <= self._settings.max_concurrent
