"""How much of what a drafter could give it gives: drafts that arrive in time, and the verified part of each."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from router.assignment import Observation, drafter_of
from router.drafter.matching import Floats
from router.estimates.decayed import DecayedSums

PRIOR_ROUNDS = 8.0  # assumed in time, with drafts verified in full, before the first of a drafter
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
FillSums = dict[str, tuple[_Sum, _Sum]]


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


class FillRates(DecayedSums[str]):
    """Share of a drafter's longest draft that is verified: lookups are often silent, and not every row pays. Sums by
    drafter: drafts in time, and their verified tokens."""

    def observe(self, observations: Iterable[Observation]) -> None:
        for seen in observations:
            if seen.num_in_time:
                new = (float(seen.num_in_time), float(seen.num_proposed))
                self.add(drafter_of(seen.drafter), new, seen.num_in_time)

    def of(self, drafter: str, max_draft_len: int) -> float:
        drafts, tokens = self.get(drafter, 2)
        return min(1.0, (tokens / max_draft_len + PRIOR_ROUNDS) / (drafts + PRIOR_ROUNDS))
