"""Checks the grammars of calls in processes of their own, so that none harms the API or a target. Tenants take turns."""

import asyncio
import hashlib
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import Overloaded
from cluster.grammar import Grammar
from cluster.types import ModelInfo
from deploy.api.errors import bad_request
from deploy.api.grammar_process import NUM_AT_ONCE, Checked, GrammarProcess
from router.planning.fair_share import SharedLimit, TokenCounters

MAX_WAITING = 32  # grammars
MAX_KNOWN = 1024  # grammars


@dataclass(slots=True)
class _Check:
    """Of one grammar, for all calls that wait for it."""

    task: "asyncio.Task[Checked | Overloaded] | None" = None
    num_calls: int = 0
    has_begun: bool = False


class GrammarChecker:
    """Checks NUM_AT_ONCE grammars at once, but one of each tenant where several tenants wait. Next is the tenant whose
    checks took the least processor time. Verdicts are kept; a check that fails for another reason refuses no grammar.

    Args:
        folder: of the model.
        retry_after_s: for the error of too many grammars, and of a check that could not be made.
    """

    def __init__(self, folder: Path, info: ModelInfo, retry_after_s: float) -> None:
        self.process = GrammarProcess(folder, info, retry_after_s)
        self.waiting = SharedLimit(MAX_WAITING)
        self._retry_after_s = retry_after_s
        # Threads of its own: checks must not take those that tokenize.
        self._threads = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="grammar-checks")
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # refusals, by digest
        self._checks: dict[bytes, _Check] = {}
        self._queue: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, none empty
        self._running: Counter[str] = Counter()  # by tenant
        self._counters = TokenCounters()  # of milliseconds

    async def check(self, field: str, grammar: Grammar, tenant: str = "") -> None:
        """Raises ApiError (400) naming ``field`` for a grammar that is refused; Overloaded: too many wait for a check, or it
        could not be made. Cancelled, a check that waits, and for which no other call does, is not made."""
        digest = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        refusal = self._known[digest] if digest in self._known else await self._learn(digest, grammar, tenant)
        if refusal is not None:
            raise bad_request(field, refusal)

    async def _learn(self, digest: bytes, grammar: Grammar, tenant: str) -> str | None:
        check = self._checks.get(digest)
        if check is None:
            self.waiting.hold(tenant, 1)
            if self.waiting.is_exceeded(tenant, least=1):
                self.waiting.give_back(tenant, 1)
                raise Overloaded("too many grammars wait for their check; try again later", self._retry_after_s)
            check = self._checks[digest] = _Check()
            check.task = asyncio.create_task(self._make(check, digest, grammar, tenant))
            check.task.add_done_callback(lambda _: self.waiting.give_back(tenant, 1))
        assert check.task is not None
        check.num_calls += 1
        try:
            result = await asyncio.shield(check.task)
        finally:
            check.num_calls -= 1
            if not check.num_calls and not check.has_begun:
                check.task.cancel()
                self._checks.pop(digest, None)
        if isinstance(result, Overloaded):
            raise result
        return result.refusal

    async def _make(self, check: _Check, digest: bytes, grammar: Grammar, tenant: str) -> Checked | Overloaded:
        await self._turn(tenant)
        check.has_begun = True
        result: Checked | Overloaded
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, self.process.check, grammar)
            self._counters.charge(tenant, 1 + round(1e3 * result.cpu_s))
            self._known[digest] = result.refusal
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        except Overloaded as error:
            result = error
        finally:
            del self._checks[digest]
            self._running[tenant] -= 1
            self._grant()
        return result

    async def _turn(self, tenant: str) -> None:
        """Waits for it. It ends when ``_running`` is decreased."""
        turn = asyncio.get_running_loop().create_future()
        self._counters.arrive(tenant, self._queue)
        self._queue.setdefault(tenant, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was granted meanwhile
                self._running[tenant] -= 1
                self._grant()
            raise

    def _grant(self) -> None:
        for tenant in tuple(self._queue):
            self._drop_cancelled(tenant)
        most = 1 if self.waiting.is_shared else NUM_AT_ONCE
        while self._running.total() < NUM_AT_ONCE:
            tenants = [one for one in self._queue if self._running[one] < most]
            if not tenants:
                return
            tenant = self._counters.next_of(tenants)
            self._queue[tenant].popleft().set_result(None)
            self._running[tenant] += 1
            self._drop_cancelled(tenant)

    def _drop_cancelled(self, tenant: str) -> None:
        turns = self._queue[tenant]
        while turns and turns[0].cancelled():
            turns.popleft()
        if not turns:
            del self._queue[tenant]
