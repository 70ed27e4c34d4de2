"""Which drafters work ahead of a frontier (FASER, 4.3), by how much, and the budgets of their requests."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from cluster.types import DraftTerms
from router.drafting.overlap_gains import Pipeline
from router.plan import Frontier, SequenceView

MAX_CHUNK_LEN = 16
MARGIN = 0.05  # share of the time that a frontier must be expected to save before a drafter gets it
HYSTERESIS = 0.05  # by which its chunks must be slower than others before they change: drafts under way are lost then
_PERIOD = 8  # passes from one choice to the next
_NUM_WORSE = 2  # lengths in a row, each slower than the last, after which no longer one is tried


class Frontiers:
    """Chooses every few passes, and when the number of requests leaves its octave. A frontier is compared with waiting for
    whole proposals of the best length.

    What it knows is replaced rather than changed, so that a copy (`copy.copy`) knows the same, and then learns for itself.

    Args:
        always: every drafter whose times are known has one.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self.present: dict[str, Frontier] = {}  # by drafter, of those that have one
        self._octaves: dict[str, int] = {}  # of requests, at the last choice
        self._num_left = 0  # passes before the next choice

    def clear(self) -> None:
        """No drafter has one: requests are verified otherwise."""
        self.present = {}
        self._num_left = 0

    def choose(self, pipeline: Pipeline) -> Mapping[str, Frontier]:
        """Once for each pass. Returns those present."""
        octaves = {name: num_requests.bit_length() for name, (_, num_requests) in pipeline.drafters.items()}
        if not self._num_left or any(self._octaves.get(name) != octave for name, octave in octaves.items()):
            self._num_left, self._octaves = _PERIOD, {**self._octaves, **octaves}
            chosen = {**self.present, **{name: self._of(name, pipeline) for name in pipeline.drafters}}
            self.present = {name: frontier for name, frontier in chosen.items() if frontier is not None}
        self._num_left -= 1
        return self.present

    def _of(self, name: str, pipeline: Pipeline) -> Frontier | None:
        drafter, num_requests = pipeline.drafters[name]
        if not self._always and (drafter.shares_device or drafter.acceptance**2 <= MARGIN):
            return None  # at most a share a^2 of its guesses come true, so that overlap saves next to nothing
        if not pipeline.token_s(name, num_requests):
            return None
        best, rate = _best(lambda length: pipeline.frontier_rate(name, length))
        present = self.present.get(name)
        if present is not None:
            present_rate = pipeline.frontier_rate(name, present.chunk_len)
            if present_rate >= (1.0 - HYSTERESIS) * rate:
                best, rate = present.chunk_len, present_rate
        if not self._always:
            margin = MARGIN if present is None else 0.0
            if rate * (1.0 - margin) <= _best(lambda length: pipeline.barrier_rate(name, length))[1]:
                return None
        return Frontier(best)


def _best(rate_of: Callable[[int], float]) -> tuple[int, float]:
    """The length with the highest rate, and the rate."""
    best, best_rate, last_rate, num_worse = 1, 0.0, 0.0, 0
    for length in range(1, MAX_CHUNK_LEN + 1):
        rate = rate_of(length)
        num_worse = num_worse + 1 if rate < last_rate else 0
        if num_worse >= _NUM_WORSE:
            break
        last_rate = rate
        if rate > best_rate:
            best, best_rate = length, rate
    return best, best_rate


def in_chunks(
    budgets: Mapping[str, DraftTerms], frontiers: Mapping[str, Frontier], sequences: Iterable[SequenceView]
) -> Mapping[str, DraftTerms]:
    """The budgets of requests whose drafter has a frontier are at most a chunk, and allow to draft ahead."""
    if not frontiers:
        return budgets
    found = dict(budgets)
    for sequence in sequences:
        frontier = None if sequence.drafter is None else frontiers.get(sequence.drafter)
        budget = budgets.get(sequence.request_id)
        if frontier is not None and budget is not None and budget.num_tokens:
            found[sequence.request_id] = _in_chunk(budget, frontier.chunk_len, frontier.ahead_len)
    return found


@lru_cache(1024)
def _in_chunk(budget: DraftTerms, chunk_len: int, ahead_len: int) -> DraftTerms:
    """Equal budgets stay one object, so that comparing them is quick."""
    return replace(budget, num_tokens=min(budget.num_tokens, chunk_len), ahead_len=ahead_len)
