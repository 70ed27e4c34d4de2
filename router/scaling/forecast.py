"""How many targets will be needed until further ones could be ready: experts, compared on the demand that came.

The *need* is a number of targets by the demand alone: what the fleet would have to be to meet every objective now. It does
not depend on what was decided. So each rule of a small set can be followed in thought and judged by what it would have paid
and refused (full information, as `router/policies/hedge.py` judges drafters). An expert wants

    ceil(headroom x season x maximum of the need within its window)

targets. What it would have had ready is the least that it wanted within the start-up time. It pays for what it wants, from
the moment of wanting it, and refuses the share of requests by which the need exceeds what is ready.

The cheapest expert whose share of refused requests keeps within the error budget decides. Three things correct that share:

- a prior, which counts as much as an hour of requests: the load doubles suddenly once an hour;
- one refused request, so that few requests prove little (Laplace's rule of succession);
- the *bias*: objectives that were really missed over those foreseen of the experts that decided.

Evidence fades with a time constant of a day. ``season``: growth from this part of the day to the next on earlier days;
experts with and without it compete.
"""

from math import ceil

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# The shortest is about a start-up: to keep a replica for as long as starting one takes costs at most twice the optimum.
WINDOWS_S = (60.0, 180.0, 600.0, 1800.0)
HEADROOMS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)
PRIOR_S = 3600.0
PRIOR_STEP = 2.0
MEMORY_S = 86_400.0
DAY_S = 86_400.0
SLOT_S = 600.0  # of the day's profile
DAY_WEIGHT = 0.5  # of the newest day in the profile
MAX_GROWTH = 3.0
LEAST_MISSED = 0.002  # of requests: fewer say little about the bias
MAX_BIAS = 4.0
FIRST_S = 60.0  # for which nothing is judged
CHOICE_S = 60.0  # between choices of the expert


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
    """

    def __init__(self, start_s: float, period_s: float, budget: float) -> None:
        experts = [
            (window, headroom, season) for window in range(len(WINDOWS_S)) for headroom in HEADROOMS for season in (0, 1)
        ]
        window, headroom, season = zip(*experts, strict=True)
        self._window, self._headroom, self._season = np.array(window), np.array(headroom), np.array(season)
        self._period_s, self._budget = period_s, budget
        self._lens = [max(1, round(window_s / period_s)) for window_s in WINDOWS_S]
        self._needs = np.zeros(max(self._lens))  # a ring
        self._wanted = np.zeros((max(1, ceil(start_s / period_s)) + 1, len(experts)))  # a ring of what experts wanted
        self._num_seen, self._first_s = 0, 0.0
        self._paid, self._refused = np.zeros(len(experts)), np.zeros(len(experts))
        self._num_requests = self._seconds = 0.0
        self._foreseen = self._missed = 0.0  # requests, of the experts that decided
        self._prior = (start_s + period_s) / PRIOR_S * np.maximum(0.0, PRIOR_STEP - self._headroom)
        self._profile = DayProfile()
        self._chosen = int(np.argmax(self._headroom))
        self._choose_s = 0.0
        self.is_ready = False  # before, experts have had no time to start anything

    @property
    def expert(self) -> str:
        """The one that decides, for people."""
        season = " with the time of day" if self._season[self._chosen] else ""
        return f"{self._headroom[self._chosen]:g} x the most of {WINDOWS_S[self._window[self._chosen]]:g} s{season}"

    @property
    def bias(self) -> float:
        """Requests that missed their objectives over those foreseen."""
        least = LEAST_MISSED * self._num_requests + 1.0
        return min(MAX_BIAS, max(1.0 / MAX_BIAS, (self._missed + least) / (self._foreseen + least)))

    @property
    def refused_share(self) -> Floats:
        """Of requests, by expert, as corrected; by the prior alone before any was judged."""
        if not self._num_requests:
            return self._prior
        prior = PRIOR_S * self._num_requests / max(self._seconds, self._period_s)
        return (self.bias * (self._refused + 1.0) + prior * self._prior) / max(self._num_requests + prior, 1e-9)

    def add(self, now_s: float, need: float, num_requests: float, num_missed: float) -> float:
        """Returns the number of targets to have, before rounding up.

        Args:
            need: of the last period.
            num_requests: that arrived in it.
            num_missed: that missed an objective in it.
        """
        if not self._num_seen:
            self._first_s = now_s
        self.is_ready = now_s - self._first_s >= FIRST_S + self._period_s * len(self._wanted)
        fade = 1.0 - self._period_s / MEMORY_S
        if self.is_ready:
            ready = self._wanted.min(axis=0)
            refused = num_requests * np.maximum(0.0, 1.0 - ready / max(need, 1e-9))
            self._refused = fade * self._refused + refused
            self._foreseen = fade * self._foreseen + float(refused[self._chosen])
            self._missed = fade * self._missed + num_missed
            self._num_requests = fade * self._num_requests + num_requests
            self._seconds = fade * self._seconds + self._period_s
        self._profile.add(now_s, need)
        self._needs[self._num_seen % len(self._needs)] = need
        self._num_seen += 1
        wanted = self._headroom * self._maxima()[self._window]
        wanted = np.where(self._season, self._profile.growth(now_s) * wanted, wanted)
        whole = np.maximum(1.0, np.ceil(wanted - 1e-9))
        self._wanted[self._num_seen % len(self._wanted)] = whole
        self._paid = fade * self._paid + whole
        if now_s >= self._choose_s:
            self._choose_s = now_s + CHOICE_S
            self._choose()
        return float(wanted[self._chosen])

    def _maxima(self) -> Floats:
        """Of the need, by window."""
        size, end = len(self._needs), self._num_seen % len(self._needs)
        recent = np.concatenate((self._needs[end:], self._needs[:end]))
        return np.array([recent[size - length :].max() for length in self._lens])

    def _choose(self) -> None:
        refused = self.refused_share
        within = refused <= self._budget
        if within.any():
            self._chosen = int(np.argmin(np.where(within, self._paid, np.inf)))
        else:
            self._chosen = int(np.lexsort((self._paid, refused))[0])
