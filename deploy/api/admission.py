"""Admission control: a limit on running sequences, and a bounded queue of calls that tenants share fairly."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deploy.api.errors import ApiError, bad_request, overloaded
from deploy.api.settings import ApiSettings
from deploy.api.tenants import NOBODY, Tenant
from router.planning.fair_share import TokenCounters


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    num_sequences: int
    num_prompt_tokens: int
    turn: asyncio.Future[None]


class Admission:
    """Fair among tenants, FIFO within one. A call is admitted with all its sequences or not at all.

    A full queue refuses the newest call of the tenant that has the most in it. A tenant at its own limit is passed over.

    Invariants: ``0 <= num_running <= max_concurrent``; the next call of the queue, if any, does not fit.
    """

    def __init__(self, settings: ApiSettings, queued: str = "calls") -> None:
        """``queued``: what is, for messages."""
        self._settings = settings
        self._queued = queued
        self._tenants: Mapping[str, Tenant] = {}
        self._waiting: dict[str, deque[_Waiting]] = {}  # by tenant, none empty
        self._counters = TokenCounters()
        self._num_running_of: Counter[str] = Counter()  # by tenant, none zero
        self.num_running = 0
        self._max_concurrent, self._max_queued = settings.max_concurrent, settings.max_queued
        self._num_replicas = settings.num_replicas  # that divide the limits

    def divide(self, num_replicas: int) -> None:
        """Its limits become those of one of so many replicas. What runs already goes on."""
        of, known = self._settings, self._settings.num_replicas
        self._num_replicas = num_replicas
        self._max_concurrent = (of.max_concurrent_requests or of.max_concurrent * known) // num_replicas
        self._max_queued = (of.max_queued_requests or of.max_queued * known) // num_replicas
        self._admit()

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> None:
        """By name; others have no limit of their own, and weight 1. Fails the calls that exceed a new limit: one that can
        never run would block those behind it."""
        self._tenants = tenants
        for name, calls in list(self._waiting.items()):
            for call, refusal in [(one, self._too_wide(name, one)) for one in calls]:
                if refusal is not None:
                    self._remove(name, call)
                    if not call.turn.cancelled():
                        call.turn.set_exception(refusal)
        self._counters.weights = {name: tenant.weight for name, tenant in tenants.items()}
        self._admit()

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_busy(self, num_sequences: int, tenant: str = "") -> bool:
        """Whether a call would be queued now."""
        if tenant in self._waiting or not self._fits(num_sequences) or not self._may_run(tenant, num_sequences):
            return True
        return bool(self._candidates())

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
            self._stop(tenant, held)
            held = 0
            self._admit()

        try:
            yield end
        finally:
            end()

    async def _enter(self, tenant: str, call: _Waiting) -> None:
        if (refusal := self._too_wide(tenant, call)) is not None:
            raise refusal
        is_busy = self.is_busy(call.num_sequences, tenant)
        if is_busy and self.num_queued >= self._max_queued:
            self._displace(tenant)
        self._counters.arrive(tenant, self._candidates())
        if not is_busy:
            self._start(tenant, call)
            return
        self._waiting.setdefault(tenant, deque()).append(call)
        try:
            await call.turn
        except asyncio.CancelledError:
            if not call.turn.cancelled():  # decided at the moment of the cancellation: give it back if admitted
                self._stop(tenant, call.num_sequences if call.turn.exception() is None else 0)
            elif call in self._waiting.get(tenant, ()):
                self._remove(tenant, call)
            self._admit()
            raise

    def _displace(self, tenant: str) -> None:
        """Makes room for a call of ``tenant``. Raises ApiError (429): no other has more than one call more in the queue."""
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
        refusal = overloaded(
            f"{self.num_queued} {self._queued} are queued; try again later", self._settings.retry_after_s, "queue_full"
        )
        if len(self._waiting.get(longest, ())) <= len(self._waiting.get(tenant, ())) + 1:
            raise refusal
        newest = self._waiting[longest][-1]
        self._remove(longest, newest)
        if not newest.turn.cancelled():
            newest.turn.set_exception(refusal)

    def _admit(self) -> None:
        while candidates := self._candidates():
            tenant = self._counters.next_of(candidates)
            call = self._waiting[tenant][0]
            if not self._fits(call.num_sequences):
                return
            self._remove(tenant, call)
            if not call.turn.cancelled():
                self._start(tenant, call)
                call.turn.set_result(None)

    def _start(self, tenant: str, call: _Waiting) -> None:
        self.num_running += call.num_sequences
        self._num_running_of[tenant] += call.num_sequences
        self._counters.charge(tenant, call.num_prompt_tokens)

    def _stop(self, tenant: str, num_sequences: int) -> None:
        self.num_running -= num_sequences
        self._num_running_of[tenant] -= num_sequences
        if not self._num_running_of[tenant]:
            del self._num_running_of[tenant]

    def _candidates(self) -> list[str]:
        """Tenants that wait for others rather than for their own calls."""
        return [tenant for tenant, calls in self._waiting.items() if self._may_run(tenant, calls[0].num_sequences)]

    def _may_run(self, tenant: str, num_sequences: int) -> bool:
        most = self._tenants.get(tenant, NOBODY).max_concurrent
        return most is None or self._num_running_of[tenant] + num_sequences <= most // self._num_replicas

    def _too_wide(self, tenant: str, call: _Waiting) -> ApiError | None:
        """The error of a call that could not run at the most replicas, which may join; None: it could."""
        most = self._tenants.get(tenant, NOBODY).max_concurrent
        if most is None or call.num_sequences <= (widest := most // self._settings.most):
            return None
        return bad_request("n", f"{call.num_sequences} sequences exceed the {widest} that a call of {tenant} may have")

    def _remove(self, tenant: str, call: _Waiting) -> None:
        self._waiting[tenant].remove(call)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _fits(self, num_sequences: int) -> bool:
        return self.num_running + num_sequences <= self._max_concurrent
