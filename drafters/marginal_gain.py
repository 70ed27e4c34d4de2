"""Marginal gain and cost of querying an expensive drafter, learned from outcomes."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from router.estimates.decayed_mean import UNUSUAL, RunningMean

_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6)  # boundaries of the tokens expected without it
_HOPED = 1.0  # tokens, of a drafter of which nothing is known there
_HOPE = 3.0  # trials that this counts for
_MEMORY = 200.0  # trials of all requests that count
_OWN_MEMORY = 12.0  # of one request
_OWN_DOUBT = 8.0  # trials of a request's own before they count for half
_COST_MEMORY = 100.0  # times that count
_COST_DOUBT = 2.0  # times that what was configured weighs as much
_ALIKE = 0.05  # squared, relative: batches that differ by less say little of what one request more takes
_PAUSE = 48  # rounds without it before it is tried for one request: without trials an estimate of zero could never recover
_LONGEST_PAUSE = 768  # maximum; the pause doubles with each trial without a gain
_OLD = 12.0  # trials that what was found before a pause counts for after it


@dataclass(slots=True)
class _DraftTimes:
    """A line through the measured times of batches of drafts."""

    seconds: RunningMean = field(default_factory=RunningMean)
    batch: RunningMean = field(default_factory=RunningMean)
    square: RunningMean = field(default_factory=RunningMean)
    product: RunningMean = field(default_factory=RunningMean)

    def add(self, batch: int, seconds: float) -> None:
        if self.seconds.is_known:
            seconds = min(seconds, UNUSUAL * self.at(batch))
        for mean, sample in zip(
            (self.seconds, self.batch, self.square, self.product),
            (seconds, batch, batch * batch, batch * seconds),
            strict=True,
        ):
            mean.add(sample, _COST_MEMORY)

    def at(self, batch: int) -> float:
        """Not decreasing in the batch size; proportional to it as long as measured batches are too similar."""
        usual, share = self.batch.value, self.seconds.value / self.batch.value
        alike = _ALIKE * usual * usual
        spread = self.square.value - usual * usual + alike
        slope = (self.product.value - usual * self.seconds.value + alike * share) / spread
        slope = min(max(slope, 0.0), share)
        return self.seconds.value + slope * (batch - usual)


class Costs:
    """Cost of a batch of drafts of each expensive drafter, in plain rounds of the target.

    As configured, for a whole batch, until times are measured; then increasingly as measured: seconds of such a batch, on a
    line through the measured ones, over the mean seconds of a round. The whole time counts, since all requests wait for it.
    """

    def __init__(self, configured: Mapping[int, float]) -> None:
        self._configured = configured
        self._drafts = {member: _DraftTimes() for member in configured}
        self._round = RunningMean()

    def of(self, member: int, num_asked: int = 1, num_all: int = 1) -> float:
        """Cost of drafts for ``num_asked`` of a batch of ``num_all`` requests."""
        configured, drafts = self._configured[member] * num_asked / num_all, self._drafts[member]
        num = drafts.seconds.num
        if not self._round.is_known or not self._round.value or not num:
            return configured
        return (_COST_DOUBT * configured + num * drafts.at(num_asked) / self._round.value) / (_COST_DOUBT + num)

    def drafted(self, member: int, batch: int, seconds: float) -> None:
        self._drafts[member].add(batch, seconds)

    def came_true(self, seconds: float) -> None:
        """Adds the seconds of a round with drafts."""
        self._round.add(self._round.usual(seconds), _COST_MEMORY)


class RequestGain:
    """How much better a drafter does for one request than for others."""

    def __init__(self) -> None:
        self._mean = RunningMean()

    @property
    def value(self) -> float:
        return self._mean.value * self._mean.num / (self._mean.num + _OWN_DOUBT)

    def add(self, surplus: float) -> None:
        self._mean.add(surplus, _OWN_MEMORY)


class MarginalGain:
    """Of one drafter: accepted tokens that querying it added to the best draft without it."""

    def __init__(self) -> None:
        self._gains = [RunningMean() for _ in range(len(_EDGES) + 1)]
        self._num_refused = [0] * len(self._gains)
        self._pauses = [_PAUSE] * len(self._gains)

    def choose(self, at_hand: Sequence[tuple[float, RequestGain]], price: Callable[[int], float]) -> list[int]:
        """Requests of a round to query it for, ascending; chosen together, since all wait for it.

        Rounds without it are counted: now and then one request explores at any price.

        Args:
            at_hand: expected tokens without it, for each request that it could be queried for.
            price: tokens that the whole batch forgoes while it drafts for so many.
        """
        places = [bisect_right(_EDGES, expected_len) for expected_len, _ in at_hand]
        due = {at for at in set(places) if self._num_refused[at] + 1 >= self._pauses[at]}
        tried = [places.index(at) for at in due]
        expected = {at: self._expected(at) for at in set(places)}
        gains = [expected[at] + own.value for at, (_, own) in zip(places, at_hand, strict=True)]
        others = sorted((i for i in range(len(places)) if i not in tried), key=lambda i: -gains[i])
        surplus, most, num_best = 0.0, 0.0, 0
        free = price(len(tried)) if tried else 0.0
        for num, i in enumerate(others, 1):
            surplus += gains[i]
            if surplus - (price(len(tried) + num) - free) > most:
                most, num_best = surplus - (price(len(tried) + num) - free), num
        best = others[:num_best]
        self._note(due, {places[i] for i in best}, set(places))
        return sorted((*tried, *best))

    def learn(self, gain: float, expected_len: float, own: RequestGain) -> None:
        """Adds a query in which ``gain`` more tokens were accepted than without it."""
        at = bisect_right(_EDGES, expected_len)
        mean = self._gains[at]
        if gain > self._expected(at):
            self._pauses[at] = _PAUSE
        own.add(gain - mean.value)
        mean.add(gain, _MEMORY)

    def _expected(self, at: int) -> float:
        """Expected gain; optimistic while little is known."""
        gain = self._gains[at]
        return (_HOPE * _HOPED + gain.num * gain.value) / (_HOPE + gain.num)

    def _note(self, tried: Set[int], worth_it: Set[int], present: Set[int]) -> None:
        for at in present:
            if at in worth_it:
                self._pauses[at] = _PAUSE
            elif at in tried:
                self._gains[at].fade(_OLD)
                self._pauses[at] = min(2 * self._pauses[at], _LONGEST_PAUSE)
            self._num_refused[at] = 0 if at in tried or at in worth_it else self._num_refused[at] + 1
