"""How long a round takes with each drafter, as the requests that were with it saw it."""

from collections.abc import Sequence
from math import exp

import numpy as np

from router.assignment import Observation, PoolMember, drafter_of
from router.matching import Floats


class RoundTimes:
    """Fading sums of rounds and seconds, by drafter."""

    def __init__(self, memory_rounds: float) -> None:
        self._memory_rounds = memory_rounds
        self.sums: dict[str, tuple[float, float]] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        new: dict[str, tuple[float, float]] = {}
        for seen in observations:
            drafter = drafter_of(seen.drafter)
            rounds, seconds = new.get(drafter, (0.0, 0.0))
            new[drafter] = (rounds + seen.num_rounds, seconds + seen.elapsed_s)
        for drafter, (rounds, seconds) in new.items():
            known_rounds, known_seconds = self.sums.get(drafter, (0.0, 0.0))
            kept = exp(-rounds / self._memory_rounds)
            self.sums[drafter] = (known_rounds * kept + rounds, known_seconds * kept + seconds)

    def of(self, members: Sequence[PoolMember]) -> Floats:
        """Seconds of a round with each. Of those that nobody was with, what the target took with the others, and their own
        draft; in rounds of the target alone where there are no others."""
        drafting = np.array([1.0 + member.cost * member.max_draft_len for member in members])
        known = [self.sums.get(drafter_of(member.name)) for member in members]
        measured = np.array([np.nan if sums is None else sums[1] / sums[0] for sums in known])
        if np.isnan(measured).all():
            return drafting
        target_s = np.nanmin(measured / drafting)
        return np.where(np.isnan(measured), target_s * drafting, measured)
