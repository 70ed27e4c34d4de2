"""Virtual time: what is to happen, in order."""

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[float], None]

MAIL, STEP = 0, 1  # of what happens at one time mail comes first, so that whoever steps then has read it


class Events:
    """A queue of actions. Of those of one time and kind the first put is the first done: a run follows from its input."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action]] = []
        self._num = 0
        self.now_s = 0.0

    def at(self, time_s: float, kind: int, action: Action) -> None:
        self._num += 1
        heappush(self._heap, (time_s if time_s > self.now_s else self.now_s, kind, self._num, action))

    def run(self, until_s: float) -> None:
        """Does all that is due by then, and what comes of it; ends early when nothing is left."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, _, action = heappop(heap)
            action(self.now_s)
