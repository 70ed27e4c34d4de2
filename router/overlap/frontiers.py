"""Which drafters work ahead of a frontier (FASER, 4.3), and by how much."""

from collections.abc import Callable, Mapping

from router.estimates.decayed import DecayedMean
from router.overlap.gains import Pipeline
from router.plan import Frontier

MAX_CHUNK_LEN = 16
MARGIN = 0.05  # share of the time that a frontier must be expected to save
HYSTERESIS = (
    0.05  # and less, once it is there: estimates waver, and drafts that were begun otherwise are lost at each change
)
_PERIOD = 8  # passes from one choice to the next
_NUM_AWAITED = 16.0  # passes without a frontier after which the length of awaited proposals is known
_MEMORY = 32.0  # of these
_NUM_WORSE = 2  # lengths in a row, each slower than the last, after which no longer one is tried


class Frontiers:
    """Chooses every few passes. A frontier is compared with waiting for whole proposals as long as those that were awaited,
    or, while their length is not known for a batch of that size, of the best length.

    Args:
        always: every drafter whose times are known has one.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._present: dict[str, Frontier] = {}
        self._awaited_lens: dict[tuple[str, int], DecayedMean] = {}  # by drafter and its number of requests
        self._num_left = 0  # passes before the next choice

    def choose(self, pipeline: Pipeline) -> Mapping[str, Frontier]:
        """By drafter, of those that have one. Before each pass."""
        for name, (drafter, num_requests) in pipeline.drafters.items():
            if name not in self._present and drafter.draft_len:
                awaited_len = self._awaited_lens.setdefault((name, num_requests), DecayedMean())
                awaited_len.add(drafter.draft_len, _MEMORY)
        if not self._num_left:
            self._num_left = _PERIOD
            found = {name: self._of(name, pipeline) for name in pipeline.drafters}
            self._present = {name: frontier for name, frontier in found.items() if frontier is not None}
        self._num_left -= 1
        return self._present

    def _of(self, name: str, pipeline: Pipeline) -> Frontier | None:
        drafter, num_requests = pipeline.drafters[name]
        if not self._always and (drafter.shares_device or drafter.acceptance**2 <= MARGIN):
            return None  # at most a share a^2 of its guesses come true, and overlap saves no more of the time
        if not pipeline.token_s(name, num_requests):
            return None
        best, rate = _best(lambda length: pipeline.frontier_rate(name, length))
        present = self._present.get(name)
        if present is not None:
            present_rate = pipeline.frontier_rate(name, present.chunk_len)
            if present_rate >= (1.0 - HYSTERESIS) * rate:
                best, rate = present.chunk_len, present_rate
        if not self._always:
            margin = MARGIN if present is None else MARGIN - HYSTERESIS
            if rate * (1.0 - margin) <= self._awaited_rate(name, num_requests, pipeline):
                return None
        return Frontier(best)

    def _awaited_rate(self, name: str, num_requests: int, pipeline: Pipeline) -> float:
        awaited_len = self._awaited_lens.get((name, num_requests))
        if awaited_len is not None and awaited_len.num >= _NUM_AWAITED:
            return pipeline.barrier_rate(name, awaited_len.value)
        return _best(lambda length: pipeline.barrier_rate(name, length))[1]


def _best(rate_of: Callable[[int], float]) -> tuple[int, float]:
    """The length with the highest rate, and the rate."""
    best, best_rate, last_rate, num_worse = 1, 0.0, 0.0, 0
    for length in range(1, MAX_CHUNK_LEN + 1):
        rate = rate_of(length)
        num_worse = num_worse + 1 if rate < last_rate else 0
        if num_worse > _NUM_WORSE:
            break
        last_rate = rate
        if rate > best_rate:
            best, best_rate = length, rate
    return best, best_rate
