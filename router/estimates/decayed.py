"""Exponential forgetting, the one statistic behind all estimates: a sample counts 1/e after ``memory`` newer ones."""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import zip_longest
from math import exp
from typing import Generic, TypeVar

import numpy as np
from pydantic import JsonValue

from router.cost_model import Floats

Key = TypeVar("Key", bound=Hashable)

_FEW = 5  # samples before a mean is known
# Samples that a mean remembers: of what changes within a second, of most estimates, and of what hardly changes.
RECENT, USUAL, LASTING = 10.0, 64.0, 500.0
UNUSUAL = 3.0  # times the mean: beyond it a sample is an outlier


class DecayedSums(Generic[Key]):
    """Sums of one or more quantities by key."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.sums: dict[Key, tuple[float, ...]] = {}

    def get(self, key: Key, num: int) -> tuple[float, ...]:
        """``num`` sums, 0 for an unknown key."""
        return self.sums.get(key) or (0.0,) * num

    def add(self, key: Key, new: tuple[float, ...], num_samples: float) -> None:
        """Adds sums over ``num_samples`` samples, each of which makes the former sums of this key fade."""
        former = self.sums.get(key)
        if former is None:
            self.sums[key] = new
        else:
            kept = exp(-num_samples / self._memory)
            pairs = zip(former, new) if len(former) == len(new) else zip_longest(former, new, fillvalue=0.0)  # noqa: B905
            self.sums[key] = tuple([a * kept + b for a, b in pairs])

    def snapshot(self) -> dict[Key, JsonValue]:
        """The sums of every key that has any samples, the first sum being their number."""
        return {key: list(sums) for key, sums in self.sums.items() if sums[0]}

    def fade(self, num_samples: float, least: float) -> None:
        """Makes all sums fade, and drops the keys whose first sum falls below ``least``."""
        kept = exp(-num_samples / self._memory)
        faded = {key: tuple([kept * a for a in sums]) for key, sums in self.sums.items()}
        self.sums = {key: sums for key, sums in faded.items() if sums[0] >= least}


def retained(num_samples: Floats, memory: float) -> Floats:
    """Share of former sums that is left after so many new samples, elementwise."""
    left: Floats = np.exp(-num_samples / memory)
    return left


@dataclass(slots=True)
class DecayedMean:
    """Mean of about the last ``memory`` samples; of all samples until there are so many. ``num`` at first: samples that the
    prior ``value`` counts for."""

    memory: float = USUAL
    value: float = 0.0
    num: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.num >= _FEW

    @property
    def or_none(self) -> float | None:
        """None before the first sample."""
        return self.value if self.num else None

    def add(self, sample: float) -> None:
        self.num = min(self.num + 1.0, self.memory)
        self.value += (sample - self.value) / self.num

    def add_all(self, total: float, num: int) -> None:
        """As ``add`` of ``num`` samples with this sum, at least one."""
        self.num += num
        if self.num > self.memory:
            self.num = max(self.memory, num)
        self.value += (total - num * self.value) / self.num

    def shrunk(self, prior: float, num_prior: float) -> float:
        """The mean with ``num_prior`` more samples of ``prior``."""
        return (self.num * self.value + num_prior * prior) / (self.num + num_prior)

    def fade(self, num: float) -> None:
        """Caps the weight of the present mean at ``num`` samples."""
        self.num = min(self.num, num)

    def clipped(self, sample: float) -> float:
        """Clips outliers (a prompt in the same pass, another program) at UNUSUAL times the mean."""
        return min(sample, UNUSUAL * self.value) if self.is_known else sample


T = TypeVar("T")

# A target whose report is late for a few slots must not cost its requests what was learned of them.
GENERATION_SLOTS = 32


class ExpiringCache(Generic[T]):
    """A mapping that drops entries unused for one to two generations of slots; its size is bounded by the live requests."""

    def __init__(self) -> None:
        self._young: dict[str, T] = {}
        self._old: dict[str, T] = {}
        self._slot = 0

    def next_slot(self) -> None:
        self._slot += 1
        if self._slot % GENERATION_SLOTS == 0:
            self._old, self._young = self._young, {}

    def get(self, request_id: str) -> T | None:
        value = self._young.get(request_id)
        if value is None:
            value = self._old.get(request_id)
            if value is not None:
                self._young[request_id] = value
        return value

    def put(self, request_id: str, value: T) -> None:
        self._young[request_id] = value

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
