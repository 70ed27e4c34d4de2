"""Whether an option pays, as measured: spells with it take turns with spells without it; and when it is tried again."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

MIN_GAIN = 0.02  # least saving, as a share: below it, errors of the measurement decide
MIN_NUM, MAX_NUM = 8.0, 32.0  # comparisons after which a trial may end, and must unless the saving exceeds MIN_GAIN
MAX_PROMISING_NUM = 128.0  # after which it must even so
CONTROL_PERIOD, RARE_PERIOD = 8, 32  # spells from one without the option to the next, where it is used
SURE = 2.0  # standard errors, from which on a saving is not in doubt
_MAX_LOG_RATIO = math.log(1.3)  # of a spell over the median of those before it: beyond it, something else ran


class Trial:
    """A spell is a pass, or some rounds; its cost is in any unit in which spells can be compared, such as seconds per
    committed token. A spell without the option is compared with those just before it, since the speed of a machine drifts.

        trying   spells with and without the option take turns
        on       every CONTROL_PERIOD-th spell is without it; every RARE_PERIOD-th while the saving is not in doubt
        off      all are without it, for a pause that doubles with each trial in vain

    Args:
        min_pause, max_pause: in spells.
    """

    def __init__(self, min_pause: int, max_pause: int) -> None:
        self._saved = _Spread()  # log of the cost without the option over the cost with it
        # Log costs of spells since the last one without it.
        self._with_logs: deque[float] = deque(maxlen=CONTROL_PERIOD - 1)
        self._num_off = 0  # spells that are left of the pause
        self._min_pause, self._max_pause = min_pause, max_pause
        self._pause = min_pause
        self._is_on = False
        self._is_sure = False
        self._num_since = 0  # spells since the last one without it

    def next(self) -> bool | None:
        """Whether the next spell uses the option; None: it does not, and is not measured."""
        if self._num_off:
            self._num_off -= 1
            return None
        self._num_since += 1
        if self._num_since < self._period:
            return True
        self._num_since = 0
        return False

    @property
    def _period(self) -> int:
        if not self._is_on:
            return 2
        return RARE_PERIOD if self._is_sure else CONTROL_PERIOD

    @property
    def is_paused(self) -> bool:
        """Whether the option is off, so that no spell is measured."""
        return self._num_off > 0

    def note(self, is_used: bool, cost: float) -> None:
        """A measured spell. A cost of 0, by a clock that is too coarse, says nothing."""
        if cost <= 0.0:
            return
        if is_used:
            self._with_logs.append(math.log(cost))
        elif self._with_logs:  # a mean of logs: the log of a mean of several would be larger than that of one as noisy
            middle = median(self._with_logs)
            ratio = _clipped(math.log(cost) - middle) - fmean([_clipped(one - middle) for one in self._with_logs])
            self._with_logs.clear()
            self._saved.add(ratio, MAX_NUM if self._is_on else MAX_PROMISING_NUM)
            self._decide()
            # In doubt while the last comparison lost more than half of the mean saving.
            self._is_sure = self._saved.mean > max(-2.0 * ratio, SURE * self._saved.error)

    def _decide(self) -> None:
        saved, doubt, num = self._saved.mean, self._saved.error, self._saved.num
        if num < MIN_NUM:
            return
        if self._is_on:
            pays = saved > 0.0
        elif saved < -2.0 * doubt or num >= (MAX_NUM if saved <= MIN_GAIN else MAX_PROMISING_NUM):
            pays = saved > MIN_GAIN + doubt
        elif saved > max(2.0 * doubt, MIN_GAIN + doubt):
            pays = True
        else:
            return
        if pays and not self._is_on:
            self._pause = self._min_pause
        if not pays:
            self._num_off, self._pause = self._pause, min(self._max_pause, 2 * self._pause)
            self._saved = _Spread()
        self._is_on = pays


def _clipped(log_ratio: float) -> float:
    return max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, log_ratio))


class _Spread:
    """Mean of about the last ``memory`` samples and its standard error."""

    def __init__(self) -> None:
        self.num = 0.0
        self.mean = self._square = 0.0

    def add(self, sample: float, memory: float) -> None:
        self.num = min(self.num + 1.0, memory)
        self.mean += (sample - self.mean) / self.num
        self._square += (sample * sample - self._square) / self.num

    @property
    def error(self) -> float:
        return math.sqrt(max(0.0, self._square - self.mean * self.mean) / max(1.0, self.num - 1.0))


EXPLORED = 0.01  # of the time, that trials may lose


@dataclass(slots=True)
class Exploration:
    """When an option that does not pay is tried again, since an estimate of zero could never recover: each round without it
    earns EXPLORED of a round, and a trial is due once that covers what it will lose.

    Args:
        shortest, longest: rounds between two trials.
        num_rounds: of a trial.
        growth: of what must be covered, with each trial in vain.
        credit: rounds that trials may lose already; below 0: those that must be earned before.
    """

    shortest: int = 64
    longest: int = 512
    num_rounds: int = 1
    growth: float = 2.0
    credit: float = 0.0
    _num_vain: int = 0
    _num_left: int = 0  # rounds of the present trial

    def reset(self) -> None:
        """The option pays."""
        self.credit, self._num_vain, self._num_left = 0.0, 0, 0

    def tries(self, loss: float = 0.0) -> bool:
        """Counts a round. Returns whether it is one of a trial, which loses about ``loss`` rounds."""
        if self._num_left:
            self._num_left -= 1
            return True
        self.credit += EXPLORED
        pause = min(max(loss / EXPLORED, self.shortest) * self.growth**self._num_vain, self.longest)
        if self.credit < EXPLORED * (pause - 0.5):
            return False
        self.credit, self._num_left = 0.0, self.num_rounds - 1
        self._num_vain += pause < self.longest
        return True
