"""Time since a pass last advanced: distinguishes a long pass from a hung one."""

import time
from collections.abc import Callable


class Progress:
    """``advanced`` is called by the thread that computes, at least once a layer; ``still_s`` by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._advanced_s = clock()

    def advanced(self) -> None:
        self._advanced_s = self._clock()

    def still_s(self) -> float:
        """Seconds since the last advance; since the beginning, if there was none."""
        return self._clock() - self._advanced_s


# Of this process: whatever model its loop runs. A process has one loop.
PASSES = Progress()
