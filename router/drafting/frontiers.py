"""Which drafters work ahead of a frontier (FASER, 4.3), by how much, and the budgets of their requests."""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import lru_cache

from cluster.types import DraftTerms
from router.drafting.overlap_gains import Pipeline
from router.estimates.decayed import DecayedMean
from router.plan import Frontier, SequenceView

MAX_CHUNK_LEN = 16
MARGIN = 0.05  # share of the time that a frontier must be expected to save before a drafter gets it
HYSTERESIS = 0.05  # by which its chunks must be slower than others before they change: drafts under way are lost then
_PERIOD = 8  # passes from one choice to the next
_NUM_AWAITED = 16.0  # passes without a frontier after which the length of awaited proposals is known
_FADES = 1 / 64  # of them at each choice while there is a frontier: the length policy may want other lengths by now
_SETTLES = 16  # passes after a frontier in which lengths are still those of chunks
_NUM_WORSE = 2  # lengths in a row, each slower than the last, after which no longer one is tried


class Frontiers:
    """Chooses every few passes, and when the number of requests leaves its octave. A frontier is compared with waiting for
    whole proposals as long as those that were awaited, or, while their length is not known for a batch of that size, of the
    best length.

    What it knows is replaced rather than changed, so that a copy (`copy.copy`) knows the same, and then learns for itself.

    Args:
        always: every drafter whose times are known has one.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self.present: dict[str, Frontier] = {}  # by drafter, of those that have one
        self._awaited_lens: dict[tuple[str, int], DecayedMean] = {}  # by drafter and its number of requests
        self._settling: dict[str, int] = {}  # passes
        self._octaves: dict[str, int] = {}  # of requests, at the last choice
        self._num_left = 0  # passes before the next choice

    def clear(self) -> None:
        """No drafter has one: requests are verified otherwise."""
        self.present = {}
        self._num_left = 0

    def choose(self, pipeline: Pipeline) -> Mapping[str, Frontier]:
        """Once for each pass. Returns those present."""
        for name, (drafter, num_requests) in pipeline.drafters.items():
            if self._settling.get(name):
                self._settling = {**self._settling, name: self._settling[name] - 1}
            elif name not in self.present and drafter.draft_len:
                self._own_mean((name, num_requests), DecayedMean()).add(drafter.draft_len)
        octaves = {name: num_requests.bit_length() for name, (_, num_requests) in pipeline.drafters.items()}
        if not self._num_left or any(self._octaves.get(name) != octave for name, octave in octaves.items()):
            self._num_left, self._octaves = _PERIOD, {**self._octaves, **octaves}
            for name in pipeline.drafters:
                self._renew(name, self._of(name, pipeline))
        self._num_left -= 1
        return self.present

    def _renew(self, name: str, frontier: Frontier | None) -> None:
        if frontier is not None:
            self.present = {**self.present, name: frontier}
        elif name in self.present:
            self.present = {key: one for key, one in self.present.items() if key != name}
            self._settling = {**self._settling, name: _SETTLES}

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
            if rate * (1.0 - margin) <= self._awaited_rate(name, num_requests, pipeline, present is not None):
                return None
        return Frontier(best)

    def _own_mean(self, key: tuple[str, int], default: DecayedMean) -> DecayedMean:
        """That no copy has."""
        mean = copy(self._awaited_lens.get(key, default))
        self._awaited_lens = {**self._awaited_lens, key: mean}
        return mean

    def _awaited_rate(self, name: str, num_requests: int, pipeline: Pipeline, fades: bool) -> float:
        awaited_len = self._awaited_lens.get((name, num_requests))
        if awaited_len is not None and fades:
            awaited_len = self._own_mean((name, num_requests), awaited_len)
            awaited_len.fade(max(0.0, awaited_len.num - _FADES))
        if awaited_len is not None and awaited_len.num >= _NUM_AWAITED:
            return pipeline.barrier_rate(name, awaited_len.value)
        return _best(lambda length: pipeline.barrier_rate(name, length))[1]


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
