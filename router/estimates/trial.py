"""Whether an option pays, as measured: spells with it take turns with spells without it."""

import math

MIN_GAIN = 0.02  # least saving, as a share: below it, errors of the measurement decide
MIN_NUM, MAX_NUM = 8.0, 32.0  # comparisons after which a trial may and must end
CONTROL_PERIOD = 8
_MAX_LOG_RATIO = math.log(2.0)  # of one comparison: beyond it, something else ran


class Trial:
    """A spell is a pass, or some rounds; its cost is in any unit in which spells can be compared, such as seconds per
    committed token. A spell without the option is compared with those just before it, since the speed of a machine drifts.

        trying   spells with and without the option take turns
        on       every CONTROL_PERIOD-th spell is without it
        off      all are without it, for a pause that doubles with each trial in vain

    Args:
        min_pause, max_pause: in spells.
    """

    def __init__(self, min_pause: int, max_pause: int) -> None:
        self._saved = _Spread()  # log of the cost without the option over the cost with it
        self._with_logs, self._num_with = 0.0, 0  # sum of the log costs of the spells since the last one without it
        self._num_off = 0  # spells that are left of the pause
        self._min_pause, self._max_pause = min_pause, max_pause
        self._pause = min_pause
        self._is_on = False
        self._num_spells = 0

    def next(self) -> bool | None:
        """Whether the next spell uses the option; None: it does not, and is not measured."""
        if self._num_off:
            self._num_off -= 1
            return None
        self._num_spells += 1
        return self._num_spells % (CONTROL_PERIOD if self._is_on else 2) != 0

    @property
    def is_paused(self) -> bool:
        """Whether the option is off, so that no spell is measured."""
        return self._num_off > 0

    def note(self, is_used: bool, cost: float) -> None:
        """A measured spell. ``cost`` is positive."""
        if is_used:
            self._with_logs += math.log(cost)
            self._num_with += 1
        elif self._num_with:  # a mean of logs: the log of a mean of several would be larger than that of one as noisy
            ratio = math.log(cost) - self._with_logs / self._num_with
            self._with_logs, self._num_with = 0.0, 0
            self._saved.add(max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, ratio)))
            self._decide()

    def _decide(self) -> None:
        saved, doubt, num = self._saved.mean, self._saved.error, self._saved.num
        if num < MIN_NUM:
            return
        if self._is_on:
            pays = saved > 0.0
        elif num >= MAX_NUM or abs(saved) > 2.0 * doubt:
            pays = saved > MIN_GAIN + doubt
        else:
            return
        if pays and not self._is_on:
            self._pause = self._min_pause
        if not pays:
            self._num_off, self._pause = self._pause, min(self._max_pause, 2 * self._pause)
            self._saved = _Spread()
        self._is_on = pays


class _Spread:
    """Mean of about the last MAX_NUM samples and its standard error."""

    def __init__(self) -> None:
        self.num = 0.0
        self.mean = self._square = 0.0

    def add(self, sample: float) -> None:
        self.num = min(self.num + 1.0, MAX_NUM)
        self.mean += (sample - self.mean) / self.num
        self._square += (sample * sample - self._square) / self.num

    @property
    def error(self) -> float:
        return math.sqrt(max(0.0, self._square - self.mean * self.mean) / max(1.0, self.num - 1.0))
