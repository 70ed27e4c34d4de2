"""Draft times: seconds of a batch of drafts, as measured while serving."""

from collections.abc import Mapping

from router.estimates.decayed import LASTING, UNUSUAL, USUAL, DecayedMean

_PRIOR_TIMES = 2.0  # measured times that the prior cost weighs as much as
_ALIKE = 0.05  # squared, relative: batches that differ by less say little of what one request more takes
_PRIOR_SLOPES = 4.0  # measured times that are so alike, and proportional to the batch, before the first


class _Line:
    """Moments of measured times by batch."""

    def __init__(self, memory: float) -> None:
        self._means = [DecayedMean(memory) for _ in range(4)]

    @property
    def num(self) -> float:
        return self._means[0].num

    @property
    def seconds(self) -> float:
        return self._means[0].value

    @property
    def batch(self) -> float:
        return self._means[1].value

    def add(self, batch: int, seconds: float) -> None:
        for mean, sample in zip(self._means, (seconds, batch, batch * batch, batch * seconds), strict=True):
            mean.add(sample)

    def slope(self, prior_share: float) -> float:
        """Seconds of one request more: from 0 to those of its share, of which ``prior_share`` while batches are alike."""
        seconds, batch, square, product = (mean.value for mean in self._means)
        share, prior = seconds / batch, _PRIOR_SLOPES * _ALIKE * batch * batch
        moments = self.num * (product - batch * seconds) + prior * prior_share * share
        return min(max(moments / (self.num * (square - batch * batch) + prior), 0.0), share)


class DraftTimes:
    """A line through the measured times of batches of drafts of one drafter: its level by the latest, its slope by more.

    Args:
        prior_share: what one request more adds while batches are alike, over the mean time of a request.
    """

    def __init__(self, prior_share: float = 1.0) -> None:
        self._prior_share = prior_share
        self._level, self._slope = _Line(USUAL), _Line(2 * LASTING)
        self._request_s: float | None = None  # of one request more; None: to be computed

    @property
    def num(self) -> float:
        """Measured times that count."""
        return self._level.num

    @property
    def batch(self) -> float:
        """Mean number of requests."""
        return self._level.batch

    def add(self, batch: int, seconds: float) -> None:
        usual_s = self.at(batch)
        if usual_s:
            seconds = min(seconds, UNUSUAL * usual_s)
        self._level.add(batch, seconds)
        self._slope.add(batch, seconds)
        self._request_s = None

    def at(self, batch: float) -> float:
        """0 before the first measurement. Never falls as the batch grows."""
        if not self.num:
            return 0.0
        level = self._level
        if self._request_s is None:
            self._request_s = min(self._slope.slope(self._prior_share), level.seconds / level.batch)
        return level.seconds + self._request_s * (batch - level.batch)


class DraftCosts:
    """Cost of a batch of drafts of each expensive drafter of a cascade, in plain rounds of the target, all of whose requests
    wait for it: the prior, replaced gradually by measured seconds of such a batch over the mean seconds of a round.

    Until batches differ, larger ones are thought to take as long as those that were timed: a drafter on trial, which drafts
    for few requests, might else never draft for all. Timing larger ones corrects it.
    """

    def __init__(self, prior: Mapping[int, float]) -> None:
        self._prior = prior
        self._times = {member: DraftTimes(0.0) for member in prior}
        self.num_timed = dict.fromkeys(prior, 0)  # requests of the largest batch of drafts that was timed, by member
        self._round = DecayedMean()

    def of(self, member: int, num_queried: int = 1, num_all: int = 1) -> float:
        """Cost of drafts for ``num_queried`` of a batch of ``num_all`` requests."""
        prior, times = self._prior[member] * num_queried / num_all, self._times[member]
        if not self._round.is_known or not self._round.value or not times.num:
            return prior
        measured = times.at(num_queried) / self._round.value
        return (_PRIOR_TIMES * prior + times.num * measured) / (_PRIOR_TIMES + times.num)

    def note_drafts(self, member: int, batch: int, seconds: float) -> None:
        self._times[member].add(batch, seconds)
        self.num_timed[member] = max(self.num_timed[member], batch)

    def note_round(self, seconds: float) -> None:
        """Adds the seconds of a round with drafts."""
        self._round.add(self._round.clipped(seconds))
