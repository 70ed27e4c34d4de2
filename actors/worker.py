"""A loop on a thread of its own inside an actor, and what the supervisor calls on it."""

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import ObservabilityConfig
from cluster.cpu_scheduling import freeze_startup_objects, switch_threads_quickly
from cluster.logs import log_as_configured

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 5.0
WAIT_END_S = 10.0  # bounds how long a call of a dead caller occupies a thread of the actor

Action = Callable[[], None]


class LoopThread:
    """Runs a loop until it is stopped or fails. Every method may be called from any thread.

    Args:
        run: the loop; it returns soon after its event is set and ``wake``, which interrupts its wait, is called.
        on_end: called on the loop's thread when the loop has ended or failed.
    """

    def __init__(
        self, name: str, run: Callable[[threading.Event], None], wake: Action, on_end: Action = lambda: None
    ) -> None:
        self._name, self._run_loop, self._wake, self._on_end = name, run, wake, on_end
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._run_loop(self._stop)
        except BaseException as error:
            # The supervisor reads it through `wait_end` and starts another process.
            logger.exception("%s failed", self._name)
            self._failure = error
        finally:
            self._on_end()

    def wait_end(self, timeout_s: float | None = None) -> str | None:
        """Blocks until the loop has ended. Returns the reason, or None after the timeout."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        return "stopped" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    def stop(self) -> None:
        """Returns when the loop has ended, or after STOP_DEADLINE_S."""
        self._stop.set()
        self._wake()
        self._thread.join(STOP_DEADLINE_S)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """What the supervisor needs to know of a started process."""

    pid: int


class LoopActor(ABC):
    """An actor that runs a loop. What can fail is done by ``start``: Ray would wrap a constructor's error."""

    def __init__(self, observability: ObservabilityConfig) -> None:
        log_as_configured(observability)
        switch_threads_quickly()
        self._starting = threading.Lock()
        self._started = threading.Event()
        self._thread: LoopThread | None = None

    def start(self) -> ProcessInfo:
        """Starts the loop on the first call. Raises OutriderError if it cannot run as configured."""
        with self._starting:
            if self._thread is None:
                self._thread = self._start_loop()
                freeze_startup_objects()
                self._started.set()
        return self._info()

    @property
    def is_started(self) -> bool:
        return self._started.is_set()

    @abstractmethod
    def _start_loop(self) -> LoopThread: ...

    def _info(self) -> ProcessInfo:
        return ProcessInfo(os.getpid())

    def wait_end(self, timeout_s: float = WAIT_END_S) -> str | None:
        """Blocks until the loop has been started and has ended. Returns the reason, or None after the timeout."""
        end_s = time.monotonic() + timeout_s
        if not self._started.wait(timeout_s):
            return None
        assert self._thread is not None
        return self._thread.wait_end(max(0.0, end_s - time.monotonic()))

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()


def set_threads(num_threads: int | str) -> None:
    """Sets the threads of matrix products, before torch is imported, which reads the variables.

    Waiting threads spin for some microseconds, then sleep. With ``passive`` they would sleep at once, and be woken for every
    product, where two computing threads, as of a target and a colocated drafter, have more team members than processors.
    """
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "active")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
