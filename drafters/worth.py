"""What it brings to ask a dear drafter when cheaper ones have spoken, and what it costs: learned from what came of it."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6)  # of the tokens that are expected of what is at hand; between them it is alike
_FIRST_TRIALS = 6  # in each of them, at any price
_MEMORY = 200.0  # trials of all requests that count
_OWN_MEMORY = 12.0  # of one request
_OWN_DOUBT = 8.0  # trials of a request's own before they count for half
_COST_MEMORY = 100.0  # times that count
_COST_DOUBT = 2.0  # times that what was configured weighs as much as
_FEW_TIMES = 5  # before it is known what is usual
_UNUSUAL = 3.0
_EXPLORE_EVERY = 48  # refusals: after so many the drafter is asked all the same, or its luck could never turn


@dataclass(slots=True)
class _Mean:
    """A running mean that remembers ``memory`` trials."""

    value: float
    num: float

    def add(self, sample: float, memory: float) -> None:
        self.num = min(self.num + 1.0, memory)
        self.value += (sample - self.value) / self.num


class Costs:
    """Of one draft of each dear drafter, in rounds of the target as they are without it.

    As configured until times are given; then more and more what these say: mean seconds of a draft over mean seconds of a
    round. Of a draft for several requests the time counts as a whole, for all of them wait for it. A time far above what
    is usual (a prompt that was computed in the same pass, another program) counts as a few times as long.
    """

    def __init__(self, configured: Mapping[int, float]) -> None:
        self._configured = configured
        self._drafts = {member: _Mean(0.0, 0.0) for member in configured}
        self._round = _Mean(0.0, 0.0)

    def of(self, member: int) -> float:
        configured, draft = self._configured[member], self._drafts[member]
        if self._round.num < _FEW_TIMES or not self._round.value:
            return configured
        measured = draft.value / self._round.value
        return (_COST_DOUBT * configured + draft.num * measured) / (_COST_DOUBT + draft.num)

    def drafted(self, member: int, seconds: float) -> None:
        _add_time(self._drafts[member], seconds)

    def came_true(self, seconds: float) -> None:
        """The target's round on drafts took so long."""
        _add_time(self._round, seconds)


def _add_time(mean: _Mean, seconds: float) -> None:
    usual = mean.value if mean.num >= _FEW_TIMES else seconds
    mean.add(min(seconds, _UNUSUAL * usual), _COST_MEMORY)


class OwnGain:
    """By how much a drafter does better for one request than for others."""

    def __init__(self) -> None:
        self._mean = _Mean(0.0, 0.0)

    @property
    def value(self) -> float:
        return self._mean.value * self._mean.num / (self._mean.num + _OWN_DOUBT)

    def add(self, surplus: float) -> None:
        self._mean.add(surplus, _OWN_MEMORY)


class Worth:
    """Of one drafter: accepted tokens that asking it has added to what was at hand."""

    def __init__(self) -> None:
        self._gains = [_Mean(0.0, 0.0) for _ in range(len(_EDGES) + 1)]
        self._num_refused = [0] * len(self._gains)

    def is_worth(self, price: float, expected_len: float, own: OwnGain) -> bool:
        """Whether to ask it, at a price in accepted tokens, when ``expected_len`` are expected of what is at hand.

        A refusal is counted: now and then it is worth any price to know better.
        """
        at = bisect_right(_EDGES, expected_len)
        mean = self._gains[at]
        if mean.num < _FIRST_TRIALS or mean.value + own.value > price:
            return True
        self._num_refused[at] += 1
        if self._num_refused[at] < _EXPLORE_EVERY:
            return False
        self._num_refused[at] = 0
        return True

    def learn(self, gain: float, expected_len: float, own: OwnGain) -> None:
        """It was asked, and ``gain`` more tokens were accepted than of what was at hand alone."""
        mean = self._gains[bisect_right(_EDGES, expected_len)]
        own.add(gain - mean.value)
        mean.add(gain, _MEMORY)
