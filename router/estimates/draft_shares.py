"""Shares of rounds in which drafts arrive in time."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from router.assignment import Observation, drafter_of
from router.drafter.matching import Floats
from router.estimates.decayed import DecayedSums

PRIOR_ROUNDS = 8.0  # assumed in time before the first of a drafter
# Forgetting per round with another drafter, in rounds of its own. A drafter that was left because it was late, or seldom
# queried, is so rated better with time until a request tries it, seldom enough for that to cost little.
_ELSEWHERE = 1 / 16


def _of_those(sums: tuple[float, float]) -> tuple[float, float]:
    rounds, in_time = sums
    if in_time > rounds:
        raise ValueError(f"{in_time} of {rounds} rounds in time")
    return sums


_Sum = Annotated[float, Field(ge=0)]
OnTimeSums = dict[str, Annotated[tuple[_Sum, _Sum], AfterValidator(_of_those)]]


class OnTimeRates(DecayedSums[str]):
    """Share of rounds in which a drafter's draft arrives in time: a late draft is not wrong, but useless. Sums by drafter:
    rounds that could have had a draft, and those that had one."""

    def observe(self, observations: Iterable[Observation]) -> None:
        new = dict.fromkeys(self.sums, (0.0, 0.0))
        for seen in observations:
            drafter = drafter_of(seen.drafter)
            rounds, in_time = new.get(drafter, (0.0, 0.0))
            new[drafter] = (rounds + seen.num_awaited, in_time + seen.num_in_time)
        total = sum(rounds for rounds, _ in new.values())
        for drafter, (rounds, in_time) in new.items():
            self.add(drafter, (rounds, in_time), rounds + _ELSEWHERE * (total - rounds))

    def shares(self, drafters: Sequence[str]) -> Floats:
        """On-time share of each, from 0 to 1."""
        known = np.array([self.get(drafter, 2) for drafter in drafters])
        found: Floats = (known[:, 1] + PRIOR_ROUNDS) / (known[:, 0] + PRIOR_ROUNDS)
        return found
