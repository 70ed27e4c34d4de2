"""Share of rounds in which a drafter's draft arrives in time. A late draft is not wrong, but useless."""

from collections.abc import Sequence
from math import exp
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field, JsonValue

from router.assignment import Observation, drafter_of
from router.matching import Floats

PRIOR_ROUNDS = 8.0  # in time, that a drafter is thought to have had before its first
# Of a round with another drafter, as a share of a round of its own, in what it makes forget: so one that was left because it
# was late, or seldom asked, is thought better of with time, until the first request tries it, and seldom enough for that to
# cost little.
_ELSEWHERE = 1 / 16


def _of_those(sums: tuple[float, float]) -> tuple[float, float]:
    rounds, in_time = sums
    if in_time > rounds:
        raise ValueError(f"{in_time} of {rounds} rounds in time")
    return sums


_NumRounds = Annotated[float, Field(ge=0)]
Sums = dict[str, Annotated[tuple[_NumRounds, _NumRounds], AfterValidator(_of_those)]]


class OnTimeRates:
    """Decayed sums of rounds that could have had a draft, and of those that had one, by drafter."""

    def __init__(self, memory_rounds: float) -> None:
        self._memory_rounds = memory_rounds
        self.sums: Sums = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        new = dict.fromkeys(self.sums, (0, 0))
        for seen in observations:
            drafter = drafter_of(seen.drafter)
            rounds, in_time = new.get(drafter, (0, 0))
            new[drafter] = (rounds + seen.num_awaited, in_time + seen.num_in_time)
        total = sum(rounds for rounds, _ in new.values())
        for drafter, (rounds, in_time) in new.items():
            known_rounds, known_in_time = self.sums.get(drafter, (0.0, 0.0))
            kept = exp(-(rounds + _ELSEWHERE * (total - rounds)) / self._memory_rounds)
            self.sums[drafter] = (known_rounds * kept + rounds, known_in_time * kept + in_time)

    def snapshot(self) -> dict[str, JsonValue]:
        """Drafters with any rounds."""
        return {drafter: [rounds, in_time] for drafter, (rounds, in_time) in self.sums.items() if rounds}

    def shares(self, drafters: Sequence[str]) -> Floats:
        """On-time share of each, from 0 to 1."""
        known = np.array([self.sums.get(drafter, (0.0, 0.0)) for drafter in drafters])
        found: Floats = (known[:, 1] + PRIOR_ROUNDS) / (known[:, 0] + PRIOR_ROUNDS)
        return found
