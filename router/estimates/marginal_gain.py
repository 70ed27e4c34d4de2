"""Marginal gain of querying an expensive drafter, learned from outcomes."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from router.estimates.decayed import DecayedMean
from router.estimates.exploration import Pause

_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6)  # boundaries of the tokens expected without it
_PRIOR_GAIN = 1.0  # tokens, of a drafter of which nothing is known there
_PRIOR_TRIALS = 3.0  # trials that this counts for
# Until there are so many it is queried for few requests of a batch, in some rounds: all requests wait for its drafts, and a
# target that compares what all drafters cost and save together (`router/break_even.py`) takes trials for their usual cost.
_TRIED_SHARE, _TRIED_EVERY = 1 / 8, 4
_MEMORY = 200.0  # trials of all requests that count
_OWN_MEMORY = 12.0  # of one request
_OWN_PRIOR_TRIALS = 8.0  # trials of a request's own before they count for half
_STALE_TRIALS = 12.0  # trials that what was found before a pause counts for after it


class RequestGain:
    """How much better a drafter does for one request than for others."""

    def __init__(self) -> None:
        self._mean = DecayedMean()

    @property
    def value(self) -> float:
        return self._mean.value * self._mean.num / (self._mean.num + _OWN_PRIOR_TRIALS)

    def add(self, surplus: float) -> None:
        self._mean.add(surplus, _OWN_MEMORY)


class MarginalGain:
    """Of one drafter: accepted tokens that querying it added to the best draft without it."""

    def __init__(self) -> None:
        self._gains = [DecayedMean() for _ in range(len(_EDGES) + 1)]
        self._pauses = [Pause() for _ in self._gains]
        self._num_unknown_rounds = 0  # with requests at places where little is known

    def choose(self, at_hand: Sequence[tuple[float, RequestGain]], price: Callable[[int], float]) -> list[int]:
        """Requests of a round to query it for, ascending; chosen together, since all wait for it. After enough rounds
        without it, one request explores at any price. ``at_hand``: expected tokens without it, by request. ``price``: tokens
        that the batch would decode while it drafts for so many."""
        places = [bisect_right(_EDGES, expected_len) for expected_len, _ in at_hand]
        due = {at for at in set(places) if self._pauses[at].count_round()}
        tried = [places.index(at) for at in due]
        expected = {at: self._expected(at) for at in set(places)}
        gains = [expected[at] + own.value for at, (_, own) in zip(places, at_hand, strict=True)]
        others = sorted((i for i in range(len(places)) if i not in tried), key=lambda i: -gains[i])
        unknown = {at for at in expected if self._gains[at].num < _PRIOR_TRIALS}
        if unknown and len(places) > 1:
            others = self._few_unknown(others, [at in unknown for at in places])
        surplus, most, num_best = 0.0, 0.0, 0
        free = price(len(tried)) if tried else 0.0
        for num, i in enumerate(others, 1):
            surplus += gains[i]
            if surplus - (price(len(tried) + num) - free) > most:
                most, num_best = surplus - (price(len(tried) + num) - free), num
        best = others[:num_best]
        paying = {places[i] for i in best}
        for at in paying:
            self._pauses[at].reset()
        for at in due - paying:
            self._gains[at].fade(_STALE_TRIALS)
        return sorted((*tried, *best))

    def _few_unknown(self, chosen: Sequence[int], is_unknown: Sequence[bool]) -> list[int]:
        """``chosen`` with few of those for whom it is unknown what the drafter gains, and in most rounds none."""
        self._num_unknown_rounds += 1
        most = max(1, int(_TRIED_SHARE * len(is_unknown)))
        if self._num_unknown_rounds % _TRIED_EVERY != 1:
            most = 0
        left_out = set([i for i in chosen if is_unknown[i]][most:])
        return [i for i in chosen if i not in left_out]

    def learn(self, gain: float, expected_len: float, own: RequestGain) -> None:
        """Adds a query in which ``gain`` more tokens were accepted than without it."""
        at = bisect_right(_EDGES, expected_len)
        mean = self._gains[at]
        if gain > self._expected(at):
            self._pauses[at].reset()
        own.add(gain - mean.value)
        mean.add(gain, _MEMORY)

    def _expected(self, at: int) -> float:
        """Expected gain; optimistic while little is known."""
        return self._gains[at].shrunk(_PRIOR_GAIN, _PRIOR_TRIALS)
