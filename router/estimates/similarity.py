"""Agreement between models of a chain, and their pass times, learned from verifications.

SpecRouter's SimScore (equations 5 and 6) is one minus the total variation (TV) of two models' distributions. Here no
distributions travel, only tokens drawn with the same noise (DESIGN idea 1), and their rate of agreement gives the same
information:

    agreement = s (0.8 + 0.2 s)        s = 1 - total variation

This fits measurements with SmolLM2-135M to 0.01: 0.97 s, 0.91 s and 0.88 s at a TV of 0.1, 0.45 and 0.6. It lies between the
proved bound (1 - TV) / (1 + TV) and 1 - TV, which no coupling exceeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, sqrt

from cluster.messages import LevelReport, Verified
from router.chains import PROPOSAL_LEN

_STRENGTH = 8.0  # drafts that the guess before the first is worth

Rates = tuple[float, ...]


def agreement(similarity: float) -> float:
    """How often two models of a similarity choose the same token with the same noise (SpecRouter's f)."""
    return similarity * (0.8 + 0.2 * similarity)


def similarity(agreement: float) -> float:
    """The inverse of ``agreement``."""
    return (sqrt(0.64 + 0.8 * agreement) - 0.8) / 0.4


def guess(lower: Rates, upper: Rates) -> Rates:
    """Prior agreement of two drafters, from how often each agrees with the target.

    By the triangle inequality their TV lies between the difference and the sum of those to the target; the midpoint is the
    larger of the two, so the similarity is the smaller.
    """
    return tuple(map(min, lower, upper))


@dataclass(slots=True)
class _Seen:
    """Decayed sums of a proposer and its verifier, by position."""

    reached: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    num_asked: float = 0.0  # tokens
    num_proposed: float = 0.0


class Similarities:
    """Agreement of drafters by position, from verifications within chains: an exponential moving average over about
    ``memory`` drafts.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._seen: dict[tuple[str, str], _Seen] = {}

    def observe(self, verifier: str, verified: Verified) -> None:
        seen = self._seen.setdefault((verified.proposer, verifier), _Seen())
        size = len(verified.num_reached)
        for sums in (seen.reached, seen.right):
            sums.extend([0.0] * (size - len(sums)))
        kept = exp(-verified.num_reached[0] / self._memory) if size else 1.0
        for i in range(len(seen.reached)):
            reached, right = (verified.num_reached[i], verified.num_right[i]) if i < size else (0, 0)
            seen.reached[i] = seen.reached[i] * kept + reached
            seen.right[i] = seen.right[i] * kept + right
        seen.num_asked = seen.num_asked * kept + verified.num_asked
        seen.num_proposed = seen.num_proposed * kept + verified.num_proposed

    def rates(self, proposer: str, verifier: str, prior: Rates) -> Rates:
        """Agreement by position; ``prior`` while little is known."""
        seen = self._seen.get((proposer, verifier))
        if seen is None:
            return prior
        size = max(len(prior), len(seen.reached))
        found = []
        for i in range(size):
            known = prior[min(i, len(prior) - 1)]
            reached, right = (seen.reached[i], seen.right[i]) if i < len(seen.reached) else (0.0, 0.0)
            found.append((right + _STRENGTH * known) / (reached + _STRENGTH))
        return tuple(found)

    def fill(self, proposer: str, verifier: str, prior: float) -> float:
        """Share of the requested tokens that it proposes; ``prior`` while little is known."""
        seen = self._seen.get((proposer, verifier))
        if seen is None:
            return prior
        strength = _STRENGTH * PROPOSAL_LEN
        return (seen.num_proposed + strength * prior) / (seen.num_asked + strength)

    def score(self, proposer: str, verifier: str) -> float | None:
        """SimScore over all positions; None for two that never met."""
        seen = self._seen.get((proposer, verifier))
        if seen is None or not sum(seen.reached):
            return None
        return similarity(sum(seen.right) / sum(seen.reached))


class PassTimeFactors:
    """T_i: measured over profiled pass time of a model; SpecRouter's moving average."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._factor: dict[str, float] = {}

    def observe(self, report: LevelReport, expected_s: float) -> None:
        """``expected_s``: profiled seconds of one pass with the mean number of rows."""
        if report.num_passes and report.busy_s > 0.0 and expected_s > 0.0:
            measured = report.busy_s / report.num_passes / expected_s
            known = self._factor.get(report.drafter, measured)
            self._factor[report.drafter] = self._weight * measured + (1.0 - self._weight) * known

    def factor(self, drafter: str) -> float:
        return self._factor.get(drafter, 1.0)


class Depths:
    """Maximum length of chains that end at each drafter: one less after an error or lack of memory, down to 0, and one more
    after a calm period.
    """

    def __init__(self, most: int, calm_slots: int) -> None:
        self._most = most
        self._calm_slots = calm_slots
        self._depth: dict[str, int] = {}
        self._calm: dict[str, int] = {}

    def trouble(self, drafter: str, depth: int) -> None:
        """A chain of ``depth`` drafters failed."""
        self._depth[drafter] = max(0, min(self.of(drafter), depth) - 1)
        self._calm[drafter] = 0

    def next_slot(self, troubled: Sequence[str] = ()) -> None:
        for drafter in [one for one in self._depth if one not in troubled]:
            self._calm[drafter] += 1
            if self._calm[drafter] >= self._calm_slots:
                self._depth[drafter] += 1
                self._calm[drafter] = 0
                if self._depth[drafter] >= self._most:
                    del self._depth[drafter], self._calm[drafter]

    def of(self, drafter: str) -> int:
        return self._depth.get(drafter, self._most)
