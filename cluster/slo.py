"""Attainment of service-level objectives, counted by class."""

from dataclasses import dataclass, fields
from typing import Self

from cluster.types import Slo

MAX_CLASSES = 64  # that one process counts; requests of further ones are counted as OTHER
OTHER = "other"


@dataclass(frozen=True, slots=True)
class SloCounts:
    """Complete answers of one class by objective, and requests that were refused because theirs could not be met."""

    name: str
    num_answers: int = 0
    num_met: int = 0  # answers that met all their objectives
    num_ttft_met: int = 0
    num_ttft_missed: int = 0
    num_tpot_met: int = 0
    num_tpot_missed: int = 0
    num_refused: int = 0

    def plus(self, other: "SloCounts") -> Self:
        sums = [getattr(self, one.name) + getattr(other, one.name) for one in fields(self) if one.name != "name"]
        return type(self)(self.name, *sums)

    @classmethod
    def of_answer(cls, slo: Slo, ttft_s: float, tpot_s: float | None) -> Self:
        """One answer. ``tpot_s`` None: it had one token, so its TPOT objective is met and not counted."""
        ttft_met = slo.ttft_s is None or ttft_s <= slo.ttft_s
        tpot_met = slo.tpot_s is None or tpot_s is None or tpot_s <= slo.tpot_s
        has_ttft, has_tpot = slo.ttft_s is not None, slo.tpot_s is not None and tpot_s is not None
        ttft, tpot = (has_ttft and ttft_met, has_ttft and not ttft_met), (has_tpot and tpot_met, has_tpot and not tpot_met)
        return cls(slo.name or OTHER, 1, int(ttft_met and tpot_met), *map(int, (*ttft, *tpot)))


class Attainment:
    """Counts of one process. Other threads may read."""

    def __init__(self) -> None:
        self._counts: dict[str, SloCounts] = {}

    def note(self, counts: SloCounts) -> None:
        known = self._counts
        name = counts.name if counts.name in known or len(known) < MAX_CLASSES else OTHER
        known[name] = known.get(name, SloCounts(name)).plus(counts)

    def counts(self) -> tuple[SloCounts, ...]:
        return tuple(self._counts.values())


def summed(counts: tuple[SloCounts, ...]) -> tuple[SloCounts, ...]:
    """By class, over several processes."""
    total: dict[str, SloCounts] = {}
    for one in counts:
        total[one.name] = total.get(one.name, SloCounts(one.name)).plus(one)
    return tuple(total.values())
