"""What the present pass does not need: done at once, or where the device computes asynchronously, beside the next pass."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

from engine.target import AsynchronousEngine, TargetEngine

Later = Callable[[Callable[[], None]], None]
P = ParamSpec("P")


def observed(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """A method that raises nothing. Its object has ``observing`` (`engine.telemetry.Observing`)."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **others: P.kwargs) -> None:
        with self.observing:
            method(self, *args, **others)

    return call


def observed_later(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """As ``observed``, beside the next pass. Its object has ``later``, too."""
    at_once = observed(method)

    @wraps(method)
    def call(self: Any, /, *args: P.args, **others: P.kwargs) -> None:
        self.later(partial(at_once, self, *args, **others))

    return call


def at_once(work: Callable[[], None]) -> None:
    """As ``DeferredWork.later`` where nothing is deferred."""
    work()


class DeferredWork:
    """The round owns it. ``waits``: something else needs the work of a round before the next pass."""

    def __init__(self, engine: TargetEngine, waits: bool) -> None:
        self._engine = engine if isinstance(engine, AsynchronousEngine) else None
        self._is_asynchronous = self._engine is not None and self._engine.is_asynchronous
        self._waits = waits
        self._work: list[Callable[[], None]] = []

    def begin_pass(self) -> None:
        """Before each ``execute``: another loop may have used the engine."""
        if self._engine is not None:
            self._engine.meanwhile = self.catch_up if self._is_asynchronous else None

    def later(self, work: Callable[[], None]) -> None:
        """Beside the next pass, in the order of the calls. It may neither end a request nor use the engine."""
        if self._waits or not self._is_asynchronous:
            work()
        else:
            self._work.append(work)

    def ahead(self, work: Callable[[], None]) -> None:
        """As ``later``, of work that only saves time: beside a pass or never."""
        if self._is_asynchronous:
            self._work.append(work)

    def catch_up(self) -> None:
        """What is still to be done."""
        work, self._work = self._work, []
        for one in work:
            one()
