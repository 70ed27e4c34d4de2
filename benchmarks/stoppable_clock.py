"""A monotonic clock that can be stopped."""

import time


class StoppableClock:
    """``time.monotonic``, less the time for which it was stopped. Read by any thread, stopped and started by one."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # how long it was stopped before; what it shows while it is

    def __call__(self) -> float:
        stopped_s, shows_s = self._state
        return time.monotonic() - stopped_s if shows_s is None else shows_s

    def stop(self) -> None:
        if self._state[1] is None:
            self._state = (self._state[0], self())

    def start(self) -> None:
        shows_s = self._state[1]
        if shows_s is not None:
            self._state = (time.monotonic() - shows_s, None)
