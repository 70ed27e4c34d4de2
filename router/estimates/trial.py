"""Whether an option pays, as measured: spells with it take turns with spells without it."""

import math

from router.estimates.decayed import UNUSUAL

MIN_GAIN = 0.02  # least saving, as a share: below it, errors of the measurement decide
MIN_NUM, MAX_NUM = 8.0, 48.0  # spells of each kind after which a trial may and must end
CONTROL_PERIOD = 8
_FEW = 4.0  # samples before outliers are known


class Trial:
    """A spell is a pass, or some rounds; its cost is its seconds per committed token.

        trying   spells with and without the option take turns
        on       every CONTROL_PERIOD-th spell is without it
        off      all are without it, for a pause that doubles with each trial in vain

    Args:
        min_pause, max_pause: in spells.
    """

    def __init__(self, min_pause: int, max_pause: int) -> None:
        self._with, self._without = _Spread(), _Spread()
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

    def note(self, is_used: bool, token_s: float) -> None:
        """A measured spell: its seconds per committed token."""
        (self._with if is_used else self._without).add(token_s)
        num = min(self._with.num, self._without.num)
        if num < MIN_NUM:
            return
        saved_s = self._without.mean - self._with.mean
        doubt_s = math.hypot(self._with.error, self._without.error)
        if self._is_on:
            pays = saved_s > 0.0
        elif num >= MAX_NUM or abs(saved_s) > 2.0 * doubt_s:
            pays = saved_s > MIN_GAIN * self._without.mean + doubt_s
        else:
            return
        if pays and not self._is_on:
            self._pause = self._min_pause
        if not pays:
            self._num_off, self._pause = self._pause, min(self._max_pause, 2 * self._pause)
            self._with, self._without = _Spread(), _Spread()
        self._is_on = pays


class _Spread:
    """Mean of about the last MAX_NUM samples and its standard error. Outliers are clipped."""

    def __init__(self) -> None:
        self.num = 0.0
        self.mean = self._square = 0.0

    def add(self, sample: float) -> None:
        if self.num >= _FEW:
            sample = min(sample, UNUSUAL * self.mean)
        self.num = min(self.num + 1.0, MAX_NUM)
        self.mean += (sample - self.mean) / self.num
        self._square += (sample * sample - self._square) / self.num

    @property
    def error(self) -> float:
        return math.sqrt(max(0.0, self._square - self.mean * self.mean) / max(1.0, self.num - 1.0))
