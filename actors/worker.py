"""A loop on a thread of its own, and what its supervisor asks of it: the part that all actors share."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.garbage import freeze_startup_objects

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 5.0
# Of one question for the end. A caller that has died keeps a thread of this process no longer than that.
WAIT_END_S = 10.0

Info = TypeVar("Info")


class LoopThread:
    """Runs a loop until stopped, or until it fails. Every method may be called from any thread.

    Args:
        run: the loop; it returns soon after its event is set and ``wake`` is called.
        wake: ends the loop's wait, so that it sees that it is to stop.
        on_end: called on the loop's thread when it has ended, whichever way.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[threading.Event], None],
        wake: Callable[[], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._run_loop = run
        self._wake = wake
        self._on_end = on_end
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._run_loop(self._stop)
        except BaseException as error:
            # Owned by `wait_end`, whose caller, the supervisor, starts another process.
            logger.exception("%s failed", self._name)
            self._failure = error
        finally:
            self._on_end()

    def wait_end(self, timeout_s: float | None = None) -> str | None:
        """Blocks until the loop has ended, and says why; None: it has not within the time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        return "stopped" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    def stop(self) -> None:
        """Returns when the loop has ended, or after STOP_DEADLINE_S."""
        self._stop.set()
        self._wake()
        self._thread.join(STOP_DEADLINE_S)


class LoopActor(ABC, Generic[Info]):
    """An actor that runs a loop. Its constructor is quick and cannot fail: what can is done by `start`, whose error then
    reaches the caller as it is, and not in Ray's obituary of the actor."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._began = threading.Event()
        self._thread: LoopThread | None = None

    def start(self) -> Info:
        """Begins, once, and tells what others must know; asked again, it only tells.

        Raises:
            OutriderError: it cannot run as configured; says why.
        """
        with self._starting:
            if self._thread is None:
                self._thread = self._begin()
                freeze_startup_objects()
                self._began.set()
        return self._info()

    @property
    def has_begun(self) -> bool:
        return self._began.is_set()

    @abstractmethod
    def _begin(self) -> LoopThread: ...

    @abstractmethod
    def _info(self) -> Info: ...

    def wait_end(self, timeout_s: float = WAIT_END_S) -> str | None:
        """Blocks until the loop has begun and ended, and says why it ended; None: it has not within the time, ask again."""
        end_s = time.monotonic() + timeout_s
        if not self._began.wait(timeout_s):
            return None
        assert self._thread is not None
        return self._thread.wait_end(max(0.0, end_s - time.monotonic()))

    def stop(self) -> None:
        """Ends the loop."""
        if self._thread is not None:
            self._thread.stop()
