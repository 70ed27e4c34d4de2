"""A background thread per process, from its first use, that waits on all unix sockets.

An asyncio loop took about four times as long per round trip.
"""

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_lock = threading.Lock()
_current: "Reactor | None" = None


class Watcher(Protocol):
    """Handles the events of a socket, on the reactor's thread."""

    def ready(self, events: int) -> None:
        """May still be called once after ``watch`` with no events."""

    def fail(self, reason: str) -> None:
        """The reactor has failed and reports no further events."""


class Reactor:
    """Obtained by ``running``. Other threads may only use ``call``."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._wake_lock = threading.Lock()
        self._is_awake = False  # a wake-up byte is in the socket
        self._has_ended = False
        self._wake_in, self._wake_out = socket.socketpair()
        try:
            self._selector = selectors.DefaultSelector()
            for end in (self._wake_in, self._wake_out):
                end.setblocking(False)
            self._selector.register(self._wake_out, READ)
            threading.Thread(target=self._run, name="outrider-io", daemon=True).start()
        except (OSError, RuntimeError):  # no descriptor or thread is left
            self._wake_in.close()
            self._wake_out.close()
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function soon on the reactor's thread, in order. After the reactor's end it does nothing."""
        with self._wake_lock:
            if self._has_ended:
                return
            self._calls.append(function)
            if not self._is_awake:
                self._is_awake = True
                self._wake_in.send(b"\0")

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._sequence), function))

    def watch(self, sock: socket.socket, events: int, watcher: Watcher) -> None:
        """Registers the events for which the watcher is called; 0: none."""
        is_known = sock in self._selector.get_map()
        if is_known and events:
            self._selector.modify(sock, events, watcher)
        elif is_known:
            self._selector.unregister(sock)
        elif events:
            self._selector.register(sock, events, watcher)

    def _run(self) -> None:
        try:
            while True:
                self._step()
        except BaseException as error:
            self._fail(f"the I/O thread failed: {error!r}")
            raise  # to threading.excepthook

    def _step(self) -> None:
        timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._wake_out:
                self._run_calls()
            else:
                watcher: Watcher = key.data
                watcher.ready(events)
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2]()

    def _run_calls(self) -> None:
        self._wake_out.recv(1)
        with self._wake_lock:
            self._is_awake = False
            calls, self._calls = self._calls, deque()
        for function in calls:
            function()

    def _fail(self, reason: str) -> None:
        global _current
        with _lock:
            _current = None
        with self._wake_lock:
            self._has_ended = True
            watchers = [key.data for key in self._selector.get_map().values() if key.data is not None]
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()
        for watcher in watchers:
            watcher.fail(reason)


def running() -> Reactor:
    """The process's reactor. Raises OSError or RuntimeError: no file descriptor or thread is left to start it."""
    global _current
    with _lock:
        if _current is None:
            _current = Reactor()
        return _current
