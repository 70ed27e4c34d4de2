"""Time since a pass last advanced: distinguishes a long pass from a hung one."""

import time
from collections.abc import Callable


class PassProgress:
    """``advanced`` is called by the computing thread, at least once per layer; ``still_s`` by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._advanced_s = clock()

    def advanced(self) -> None:
        self._advanced_s = self._clock()

    def still_s(self) -> float:
        """Seconds since the last advance, or since construction."""
        return self._clock() - self._advanced_s


# A process has one loop, and so one progress.
PASSES = PassProgress()
