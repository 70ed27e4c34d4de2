"""Compiles the grammars of waiting requests, so that no round waits for it."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import InvalidField
from cluster.grammar import Grammar

if TYPE_CHECKING:
    from engine.grammar.compiling import CompiledGrammar, Grammars

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # of one grammar, those before it in the queue included


@dataclass(slots=True)
class PendingGrammars:
    """One thread compiles, in the order of arrival. The methods are the round's.

    Args:
        wake: called when a grammar is compiled or refused.
    """

    grammars: "Grammars"
    wake: Callable[[], None]
    _waiting: "dict[str, tuple[Future[CompiledGrammar], float]]" = field(default_factory=dict)  # with deadlines
    _executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="grammars"))

    def start(self, request_id: str, grammar: Grammar, now_s: float) -> "CompiledGrammar | None":
        """The grammar, if it was compiled before. Else ``take_finished`` has the request later."""
        known = self.grammars.known(grammar)
        if known is None:
            future = self._executor.submit(self.grammars.compile, grammar)
            self._waiting[request_id] = future, now_s + TIMEOUT_S
            future.add_done_callback(lambda _: self.wake())
        return known

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._waiting:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                waiting[0].cancel()

    def take_finished(self, now_s: float) -> "list[tuple[str, CompiledGrammar | str]]":
        """The requests whose wait is over: the grammar, or why there is none."""
        finished: list[tuple[str, CompiledGrammar | str]] = []
        for request_id, (future, deadline_s) in tuple(self._waiting.items()):
            result: CompiledGrammar | str
            if future.done():
                try:
                    result = future.result()
                except InvalidField as error:
                    result = f"its grammar cannot be compiled: {error.reason}"
                except Exception as error:  # a defect of the compiler ends this request alone
                    logger.exception("a grammar could not be compiled")
                    result = f"its grammar cannot be compiled: {type(error).__name__}: {error}"
            elif now_s >= deadline_s:
                future.cancel()
                result = f"its grammar was not compiled within {TIMEOUT_S:g} seconds"
            else:
                continue
            del self._waiting[request_id]
            finished.append((request_id, result))
        return finished
