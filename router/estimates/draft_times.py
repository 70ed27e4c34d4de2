"""Draft times: seconds of a batch of drafts, as measured while serving."""

from router.estimates.decayed import LASTING, UNUSUAL, USUAL, DecayedMean

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
