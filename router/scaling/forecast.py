"""How many targets will be needed until further ones could be ready: experts, compared on the demand that came.

The *need* is a number of targets by the demand alone: what the fleet would have to be to meet every objective now. It does
not depend on what was decided. So each rule of a small set can be followed in thought and judged by what it would have paid
and refused (full information, as `router/papers/not_a_bandit.py` judges drafters). An expert wants

    ceil(headroom x season x maximum of the need within its window)

targets. What it would have had ready is the least that it wanted within the start-up time. It pays for what it wants, from
the moment of wanting it, and refuses the share of requests by which the need exceeds what is ready.

The cheapest expert whose share of refused requests keeps within the error budget decides. That share is the greater of two:

- *foreseen*: the refusals above, by the need;
- *observed*: requests that really missed an objective, as many as the expert would have had among them. They say that
  the replicas that were ready, R, were too few. With N = max(need, (1 + SHORTAGE) R), an expert with E replicas is charged
  with misses x (1 - E / N) / (1 - R / N): with none from N on. So experts learn of misses that the need did not foresee.
  Where R was more than any expert would have had, misses have another cause and do not count.

To both come one refused request, so that few requests prove little (Laplace's rule of succession), and a prior: the load,
averaged over some start-ups, doubles suddenly once an hour. An expert that had more ready than that load, by its headroom,
its window or because replicas are whole, is charged with fewer refusals. The weight of the prior halves in the first hour.

Evidence fades with a time constant of a day. ``season``: growth from this part of the day to the next on earlier days;
experts with and without it compete.
"""

from collections import deque
from math import ceil

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Of a start-up. The shortest: to keep a replica for as long as starting one takes costs at most twice the optimum.
WINDOWS = (1, 4, 13, 40)
HEADROOMS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)
PRIOR_S = 3600.0
PRIOR_STEP = 2.0
LEVEL = 1  # of WINDOWS, over which the load that doubles is averaged
MEMORY_S = 86_400.0
DAY_S = 86_400.0
SLOT_S = 600.0  # of the day's profile
DAY_WEIGHT = 0.5  # of the newest day in the profile
MAX_GROWTH = 3.0
SHORTAGE = 0.1  # of the replicas that were ready, by which they were at least too few when requests missed objectives
FIRST_S = 60.0  # for which nothing is judged
CHOICE_S = 60.0  # between choices of the expert


def _missing(need: float, ready: Floats) -> Floats:
    """Share of requests for which there are too few replicas."""
    return np.maximum(0.0, 1.0 - ready / max(need, 1e-9))


class DayProfile:
    """Mean need by time of day, over the days that were seen."""

    def __init__(self) -> None:
        self._means: list[float | None] = [None] * round(DAY_S / SLOT_S)
        self._slot: int | None = None
        self._sum, self._num = 0.0, 0

    def add(self, now_s: float, need: float) -> None:
        slot = int(now_s % DAY_S / SLOT_S)
        if slot != self._slot:
            self._close()
            self._slot = slot
        self._sum, self._num = self._sum + need, self._num + 1

    def growth(self, now_s: float) -> float:
        """What the next slot needed over what this one did, on earlier days, if it was more."""
        slot = int(now_s % DAY_S / SLOT_S)
        now, then = self._means[slot], self._means[(slot + 1) % len(self._means)]
        if not now or not then:
            return 1.0
        return min(MAX_GROWTH, max(1.0, then / now))

    def _close(self) -> None:
        if self._slot is not None and self._num:
            mean, before = self._sum / self._num, self._means[self._slot]
            self._means[self._slot] = mean if before is None else before + DAY_WEIGHT * (mean - before)
        self._sum, self._num = 0.0, 0


class Forecast:
    """Fed once every ``period_s``.

    Args:
        start_s: of a replica, from the decision on.
        budget: share of requests that may be refused for want of replicas.
        least: replicas that there are in any case.
    """

    def __init__(self, start_s: float, period_s: float, budget: float, least: int = 1) -> None:
        experts = [
            (window, headroom, season) for window in range(len(WINDOWS)) for headroom in HEADROOMS for season in (0, 1)
        ]
        window, headroom, season = zip(*experts, strict=True)
        self._window, self._headroom, self._season = np.array(window), np.array(headroom), np.array(season)
        self._period_s, self._budget, self._least = period_s, budget, least
        num_starting = max(1, ceil(start_s / period_s)) + 1  # periods
        self._lens = [num * num_starting for num in WINDOWS]
        self._needs = np.zeros(max(self._lens))  # a ring
        self._wanted = np.zeros((num_starting, len(experts)))  # a ring of what experts wanted
        self._recent: deque[tuple[float, float]] = deque(maxlen=len(self._wanted))  # need, and what was ready
        self._num_seen, self._first_s = 0, 0.0
        self._paid, self._foreseen, self._observed = (np.zeros(len(experts)) for _ in range(3))
        self._num_requests = self._seconds = 0.0
        self._step_share = (start_s + period_s) / PRIOR_S  # of time, during which a sudden step is not answered yet
        self._stepped = np.zeros(len(experts))
        self._profile = DayProfile()
        self._chosen = int(np.argmax(self._headroom))
        self._choose_s = 0.0
        self.is_ready = False  # before, experts have had no time to start anything

    @property
    def expert(self) -> str:
        """The one that decides, for people."""
        season = " with the time of day" if self._season[self._chosen] else ""
        window_s = self._period_s * self._lens[self._window[self._chosen]]
        return f"{self._headroom[self._chosen]:g} x the most of {window_s:g} s{season}"

    @property
    def headroom(self) -> float:
        """Of the expert that decides."""
        return float(self._headroom[self._chosen])

    @property
    def refused_share(self) -> Floats:
        """Of requests, by expert; by the prior alone before any was judged."""
        if not self._num_requests:
            return self._step_share * np.maximum(0.0, PRIOR_STEP - self._headroom)
        prior = PRIOR_S / (PRIOR_S + self._seconds)
        refused = np.maximum(self._foreseen, self._observed) + 1.0
        return (refused + prior * self._step_share * self._stepped) / self._num_requests

    def add(self, now_s: float, need: float, num_ready: float, num_requests: float, num_missed: float) -> float:
        """Returns the number of targets to have, before rounding up.

        Args:
            need: of the last period.
            num_ready: targets without drafts that would serve what the replicas that are ready do.
            num_requests: that arrived in it.
            num_missed: that missed an objective in it.
        """
        if not self._num_seen:
            self._first_s = now_s
        self.is_ready = now_s - self._first_s >= FIRST_S + self._period_s * len(self._wanted)
        fade = 1.0 - self._period_s / MEMORY_S
        self._recent.append((need, num_ready))
        if self.is_ready:
            self._judge(need, num_requests, num_missed, fade)
        self._profile.add(now_s, need)
        self._needs[self._num_seen % len(self._needs)] = need
        self._num_seen += 1
        wanted = self._headroom * np.array([self._most(length) for length in self._lens])[self._window]
        wanted = np.where(self._season, self._profile.growth(now_s) * wanted, wanted)
        whole = np.maximum(self._least, np.ceil(wanted - 1e-9))
        self._wanted[self._num_seen % len(self._wanted)] = whole
        self._paid = fade * self._paid + whole
        if now_s >= self._choose_s:
            self._choose_s = now_s + CHOICE_S
            self._choose()
        return float(wanted[self._chosen])

    def _judge(self, need: float, num_requests: float, num_missed: float, fade: float) -> None:
        ready = self._wanted.min(axis=0)
        foreseen = num_requests * _missing(need, ready)
        self._foreseen, self._observed = fade * self._foreseen + foreseen, fade * self._observed
        stepped = num_requests * np.maximum(0.0, PRIOR_STEP - ready / max(self._level(), 1e-9))
        self._stepped = fade * self._stepped + stepped
        self._num_requests = fade * self._num_requests + num_requests
        self._seconds = fade * self._seconds + self._period_s
        # Misses are known late: refusals after the time to first token, slow tokens when a request ends.
        num_ready = min(num for _, num in self._recent)
        if num_missed and num_ready <= ready.max():
            enough = max(max(one for one, _ in self._recent), (1.0 + SHORTAGE) * num_ready)
            self._observed += num_missed * _missing(enough, ready) / _missing(enough, np.array(num_ready))

    def _most(self, length: int) -> float:
        """Greatest of the newest needs."""
        return float(self._newest(length).max())

    def _level(self) -> float:
        """Mean need."""
        return float(self._newest(min(self._lens[LEVEL], self._num_seen)).mean())

    def _newest(self, length: int) -> Floats:
        end = self._num_seen % len(self._needs)
        return self._needs[np.arange(end - length, end)]

    def _choose(self) -> None:
        refused = self.refused_share
        within = refused <= self._budget
        if within.any():
            self._chosen = int(np.argmin(np.where(within, self._paid, np.inf)))
        else:
            self._chosen = int(np.lexsort((self._paid, refused))[0])
