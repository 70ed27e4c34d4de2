"""Compiles the grammars of waiting requests, so that no round waits for it.

The API's check of new grammars (`deploy/api/grammar_checker.py`) takes tenants in turn, at most two at a time, and costs as
much as compiling, so that grammars come here in the tenants' turns. Each is compiled again: of five grammars three took
longer to hand over serialised (up to 187 ms and 2.8 MB) than to compile (4 to 85 ms of processor time).
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar

if TYPE_CHECKING:
    from engine.grammar.compiling import CompiledGrammar, Grammars

logger = logging.getLogger(__name__)

COMPILE_S = 30.0  # of one grammar, since its own compile began
QUEUED_S = 60.0  # of one grammar, until its own compile begins
MAX_QUEUED = 32  # different grammars
MAX_LATE = 2  # threads whose compile took too long and still runs; nothing can end it


@dataclass(frozen=True, slots=True)
class GrammarRefusal:
    """``is_busy``: the same request may be taken later."""

    reason: str
    is_busy: bool = False


@dataclass(slots=True)
class _Wanted:
    """A grammar of waiting requests. ``since_s``: its first request came, or its compile began."""

    since_s: float
    request_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class PendingGrammars:
    """One grammar is compiled at a time, in the order of arrival, once for all requests that wait for it. One that takes too
    long is left to its thread, and another thread goes on with the next. The methods are the round's.

    Args:
        wake: called when a grammar is compiled or refused.
    """

    grammars: "Grammars"
    wake: Callable[[], None]
    _queue: dict[Grammar, _Wanted] = field(default_factory=dict)
    _running: "tuple[Grammar, _Wanted, Future[CompiledGrammar]] | None" = None
    _late: "dict[Grammar, Future[CompiledGrammar]]" = field(default_factory=dict)
    _executor: ThreadPoolExecutor | None = None

    def refusal(self, grammar: Grammar) -> GrammarRefusal | None:
        """Why a request with this grammar is not taken now."""
        if grammar in self._late and not self._late[grammar].done():
            return _too_slow()
        if len(self._queue) >= MAX_QUEUED and grammar not in self._queue and self.grammars.known(grammar) is None:
            return GrammarRefusal(f"{MAX_QUEUED} other grammars wait to be compiled; try again later", is_busy=True)
        return None

    def start(self, request_id: str, grammar: Grammar, now_s: float) -> "CompiledGrammar | None":
        """The grammar, if it was compiled before. Else ``take_finished`` has the request later."""
        known = self.grammars.known(grammar)
        if known is None:
            if self._running is not None and self._running[0] == grammar:
                wanted = self._running[1]
            else:
                wanted = self._queue.setdefault(grammar, _Wanted(now_s))
            wanted.request_ids.add(request_id)
            self._begin(now_s)
        return known

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._running is not None:
            self._running[1].request_ids.discard(request_id)
        for grammar, wanted in tuple(self._queue.items()):
            wanted.request_ids.discard(request_id)
            if not wanted.request_ids:
                del self._queue[grammar]

    def take_finished(self, now_s: float) -> "list[tuple[str, CompiledGrammar | GrammarRefusal]]":
        """The requests whose wait is over."""
        finished: list[tuple[str, CompiledGrammar | GrammarRefusal]] = []
        if self._running is not None:
            grammar, wanted, future = self._running
            result: CompiledGrammar | GrammarRefusal | None = None
            if future.done():
                result = self._result(future)
            elif now_s >= wanted.since_s + COMPILE_S:
                result = _too_slow()
                self._late[grammar] = future
                self._executor = None
            if result is not None:
                self._running = None
                finished += [(request_id, result) for request_id in wanted.request_ids]
        for grammar, wanted in tuple(self._queue.items()):
            if now_s >= wanted.since_s + QUEUED_S:
                del self._queue[grammar]
                busy = GrammarRefusal(
                    f"its grammar waited {QUEUED_S:g} seconds to be compiled; try again later", is_busy=True
                )
                finished += [(request_id, busy) for request_id in wanted.request_ids]
        self._begin(now_s)
        return finished

    def _begin(self, now_s: float) -> None:
        """Compiles the next grammar, if no other is compiled now."""
        self._late = {grammar: future for grammar, future in self._late.items() if not future.done()}
        if self._running is not None or not self._queue or len(self._late) >= MAX_LATE:
            return
        grammar = next(iter(self._queue))
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        try:
            future = self._executor.submit(self.grammars.compile, grammar)
        except RuntimeError:  # no thread can be started now, and this executor would never try again
            self._executor = None
            return
        wanted = self._queue.pop(grammar)
        wanted.since_s = now_s
        self._running = grammar, wanted, future
        future.add_done_callback(lambda _: self.wake())

    def _result(self, future: "Future[CompiledGrammar]") -> "CompiledGrammar | GrammarRefusal":
        try:
            compiled = future.result()
        except InvalidField as error:
            return GrammarRefusal(f"its grammar cannot be compiled: {error.reason}")
        except Exception as error:  # a defect of the compiler ends its requests alone
            logger.exception("the target could not compile a grammar")
            return GrammarRefusal(f"its grammar cannot be compiled: {type(error).__name__}: {error}")
        if self.grammars.is_full:
            return GrammarRefusal("the grammars in use leave no memory for its own; try again later", is_busy=True)
        return compiled


def _too_slow() -> GrammarRefusal:
    """The API's check has limited what it costs: this machine is loaded."""
    return GrammarRefusal(f"its grammar was not compiled within {COMPILE_S:g} seconds; try again later", is_busy=True)
