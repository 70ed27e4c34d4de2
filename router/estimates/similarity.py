"""Agreement between models of a chain, learned from verifications.

SpecRouter's SimScore (equations 5 and 6) is 1 - TV, TV being the total variation of two models' distributions. Here tokens
travel, drawn with the same noise. Their rate of agreement lies between (1 - TV) / (1 + TV) and 1 - TV; with
SmolLM2-135M it was 0.97 s, 0.91 s and 0.88 s at s = 1 - TV of 0.9, 0.55 and 0.4.
"""

from collections.abc import Sequence
from itertools import chain, repeat, zip_longest

from cluster.messages import Verified
from router.drafter.chains import PROPOSAL_LEN
from router.estimates.decayed import DecayedSums

_STRENGTH = 8.0  # drafts that the prior_agreement before the first is worth
_KNOWN = 16.0 * _STRENGTH  # of verified drafts, so that they outweigh it

Rates = tuple[float, ...]
_Pair = tuple[str, str]


def prior_agreement(lower: Rates, upper: Rates) -> Rates:
    """Prior agreement of two drafters, from how often each agrees with the target: by the triangle inequality their TV lies
    between the difference and the sum of those to the target, whose midpoint is the larger of the two."""
    return tuple(map(min, lower, upper))


class Similarities:
    """Agreement of drafters by position, from verifications within chains; remembers about ``memory`` drafts."""

    def __init__(self, memory: float) -> None:
        # By proposer and verifier: drafts that reached each position, those right there, tokens asked for and proposed.
        self._reached: DecayedSums[_Pair] = DecayedSums(memory)
        self._right: DecayedSums[_Pair] = DecayedSums(memory)
        self._asked: DecayedSums[_Pair] = DecayedSums(memory)

    def observe(self, verifier: str, verified: Verified) -> None:
        pair = (verified.proposer, verifier)
        num_drafts = verified.num_reached[0] if verified.num_reached else 0
        self._reached.add(pair, verified.num_reached, num_drafts)
        self._right.add(pair, verified.num_right, num_drafts)
        self._asked.add(pair, (verified.num_asked, verified.num_proposed), num_drafts)

    def rates(self, proposer: str, verifier: str, prior: Rates) -> Rates:
        """Agreement by position; ``prior`` while little is known."""
        pair = (proposer, verifier)
        reached, right = self._reached.get(pair, 0), self._right.get(pair, 0)
        counts = zip_longest(reached, right, range(len(prior)), fillvalue=0.0)
        priors = chain(prior, repeat(prior[-1]))
        return tuple((b + _STRENGTH * known) / (a + _STRENGTH) for (a, b, _), known in zip(counts, priors, strict=False))

    def is_known(self, proposer: str, verifier: str) -> bool:
        """Whether verified drafts outweigh the prior."""
        reached = self._reached.get((proposer, verifier), 0)
        return bool(reached) and reached[0] >= _KNOWN

    def fill(self, proposer: str, verifier: str, prior: float) -> float:
        """Share of the requested tokens that it proposes; ``prior`` while little is known."""
        num_asked, num_proposed = self._asked.get((proposer, verifier), 2)
        strength = _STRENGTH * PROPOSAL_LEN
        return (num_proposed + strength * prior) / (num_asked + strength)


class ChainLenLimits:
    """Maximum length of chains that end at each drafter: one less after an error or lack of memory, down to 0, and one more
    after ``recovery_slots`` without any."""

    def __init__(self, most: int, recovery_slots: int) -> None:
        self._most = most
        self._recovery_slots = recovery_slots
        self._limits: dict[str, tuple[int, int]] = {}  # drafter -> its limit, and slots since it changed

    def note_failure(self, drafter: str, chain_len: int) -> None:
        """A chain of ``chain_len`` drafters failed."""
        self._limits[drafter] = max(0, min(self.of(drafter), chain_len) - 1), 0

    def next_slot(self, failed: Sequence[str] = ()) -> None:
        for drafter in [one for one in self._limits if one not in failed]:
            limit, num_slots = self._limits[drafter]
            is_over = num_slots + 1 >= self._recovery_slots
            self._limits[drafter] = (limit + 1, 0) if is_over else (limit, num_slots + 1)
            if self.of(drafter) >= self._most:
                del self._limits[drafter]

    def of(self, drafter: str) -> int:
        return self._limits.get(drafter, (self._most, 0))[0]
