"""What `specrouter.py` learns of chains of models: similarity of neighbours, time of passes, verified shares, overheads.

Similarity: SpecRouter's SimScore (equations 5 and 6) is s = 1 - E[TV], TV being the total variation of two models'
distributions. Levels of a chain in one process sample it (`drafters.similarity`); what is counted everywhere is how often
their tokens, drawn with the same noise, agree: a rate between (1 - TV) / (1 + TV) and 1 - TV. The paper's
alpha = f(SimScore) is the middle of the two, times how far rates were off it, over all pairs: with SmolLM2-135M they were
0.97 s, 0.91 s and 0.88 s at s of 0.9, 0.55 and 0.4. It stands for the rate of a pair until enough of its drafts are counted.

Overhead: measured over predicted time per token, by chain. Predictions assume a device per model and one shared pass for all
requests. The ratio counts as far as it exceeds chance, separately for slots in which all requests had one chain.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field, JsonValue

from cluster.messages import LevelReport, Verified
from router.assignment import Chain, Observation, PoolMember, drafter_of
from router.cost_model import Floats, TableCost, monotone
from router.drafter.chains import PROPOSAL_LEN
from router.estimates.acceptance import PRIOR_ROUNDS, PositionCounts, Rates
from router.estimates.decayed import DecayedMean, DecayedSums

_STRENGTH = 8.0  # drafts that the prior_agreement before the first is worth
_KNOWN = 16.0 * _STRENGTH  # of verified drafts, so that they outweigh it
_MOST_STRENGTH = 32.0  # drafts that a SimScore of many tokens is worth

_MEMORY_SLOTS = 400.0  # after which measured over predicted times count 1/e
_NUM_ERRORS = 3.0  # standard errors, that they must be off 1 to be significant
_FORGOTTEN = 1e-3  # slots

_Pair = tuple[str, str]


def prior_agreement(lower: Rates, upper: Rates) -> Rates:
    """Prior agreement of two drafters, from how often each agrees with the target: by the triangle inequality their TV lies
    between the difference and the sum of those to the target, whose midpoint is the larger of the two."""
    return tuple(map(min, lower, upper))


class Similarities:
    """Agreement of drafters by position, from verifications within chains; remembers about ``memory`` drafts."""

    def __init__(self, memory: float) -> None:
        self._counts: PositionCounts[_Pair] = PositionCounts(memory)  # by proposer and verifier
        self._asked: DecayedSums[_Pair] = DecayedSums(memory)  # tokens asked for and proposed
        self._overlaps: DecayedSums[_Pair] = DecayedSums(memory)  # tokens compared, and 1 - TV at them
        self._mapping: DecayedSums[str] = DecayedSums(memory)  # of pairs with both: right tokens, and those by the middle

    def observe(self, verifier: str, verified: Verified) -> None:
        pair = (verified.proposer, verifier)
        self._counts.add(pair, verified.num_reached, verified.num_right)
        num_drafts = verified.num_reached[0] if verified.num_reached else 0
        self._asked.add(pair, (verified.num_asked, verified.num_proposed), num_drafts)
        if verified.num_compared:
            self._overlaps.add(pair, (float(verified.num_compared), verified.overlap), verified.num_compared)
        score, num_reached = self.score(*pair), sum(verified.num_reached)
        if score is not None and num_reached:
            self._mapping.add("", (sum(verified.num_right), num_reached * _middle(score)), num_reached)

    def to_json(self) -> dict[str, JsonValue]:
        """What SimScores and their mapping rest on."""
        overlaps: list[JsonValue] = [[*pair, *sums] for pair, sums in self._overlaps.sums.items()]
        return {"overlaps": overlaps, "mapping": list(self._mapping.get("", 2))}

    def restore(self, overlaps: "OverlapSums", mapping: tuple[float, float]) -> None:
        self._overlaps.sums = {(proposer, verifier): (num, overlap) for proposer, verifier, num, overlap in overlaps}
        self._mapping.sums = {"": mapping}

    def score(self, proposer: str, verifier: str) -> float | None:
        """SimScore, equation 6. None: their distributions were not compared."""
        num, overlap = self._overlaps.get((proposer, verifier), 2)
        return overlap / num if num else None

    def rates(self, proposer: str, verifier: str, prior: Rates) -> Rates:
        """Agreement by position. While little is known that by SimScore, or ``prior``."""
        pair = proposer, verifier
        score = self.score(*pair)
        if score is None:
            return self._counts.rates(pair, prior, _STRENGTH)
        num_right, num_expected = self._mapping.get("", 2)
        off = (num_right + _KNOWN) / (num_expected + _KNOWN)
        strength = min(_MOST_STRENGTH, _STRENGTH + self._overlaps.get(pair, 2)[0])
        return self._counts.rates(pair, (min(1.0, off * _middle(score)),), strength)

    def is_known(self, proposer: str, verifier: str) -> bool:
        """Whether verified drafts outweigh the prior."""
        return self._counts.num_drafts((proposer, verifier)) >= _KNOWN

    def fill(self, proposer: str, verifier: str, prior: float) -> float:
        """Share of the requested tokens that it proposes; ``prior`` while little is known."""
        num_asked, num_proposed = self._asked.get((proposer, verifier), 2)
        strength = _STRENGTH * PROPOSAL_LEN
        return (num_proposed + strength * prior) / (num_asked + strength)


def _middle(score: float) -> float:
    """Of the agreement that a SimScore allows."""
    return (score / (2.0 - score) + score) / 2.0


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
        return self._limits[drafter][0] if drafter in self._limits else self._most


TRIAL_SLOTS = 10  # that a choice is given before another is made: the first rounds with a drafter catch up, and are no rule

_SPREAD_GAIN = 1.05  # that is predicted before requests are spread: the sum of the best of several estimates is too high

Choice = str | None  # the last drafter that all requests are to be with, "" for the target alone; None: each has its own
SPREAD: Final = None
_UNCHOSEN: Final = " "  # the name of no drafter
_Positive = Annotated[float, Field(gt=0)]
_Sum = Annotated[float, Field(ge=0)]


def _of_compared(sums: tuple[str, str, float, float]) -> tuple[str, str, float, float]:
    if sums[3] > sums[2] + 0.01:
        raise ValueError(f"an overlap of {sums[3]} of {sums[2]} tokens")
    return sums


MappingSums = tuple[_Sum, _Sum]
FillSums = dict[str, tuple[_Sum, _Sum]]
OverlapSums = tuple[Annotated[tuple[str, str, _Positive, _Sum], AfterValidator(_of_compared)], ...]
OverheadSums = list[tuple[Chain | None, tuple[_Positive, _Positive, _Sum, _Sum]]]


class Compared(NamedTuple):
    """Decayed sums over the slots of a chain: predicted and measured seconds."""

    num_slots: float
    predicted: float
    measured: float
    squares: float  # of a slot's measured seconds, over its predicted ones

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def residue(self) -> float:
        """Squared deviation of slots from the mean, over their predicted seconds."""
        return max(0.0, self.squares - self.ratio * self.measured)


class ObservedOverheads(DecayedSums[Chain | None]):
    """Measured over predicted time, by the chain that all requests had, or SPREAD; fades with each slot."""

    def __init__(self) -> None:
        super().__init__(_MEMORY_SLOTS)

    def observe(self, compared: Mapping[Chain | None, tuple[float, float]]) -> None:
        """Adds a slot's (predicted, measured) seconds."""
        self.fade(1.0, _FORGOTTEN)
        for what, (predicted, measured) in compared.items():
            if predicted > 0.0:
                self.add(what, (1.0, predicted, measured, measured**2 / predicted), 0.0)

    def to_json(self) -> list[JsonValue]:
        return [[None if what is SPREAD else list(what), list(sums)] for what, sums in self.sums.items()]

    def factors(self) -> dict[Chain | None, float]:
        """Measured over predicted time of everything seen."""
        known = [Compared(*sums) for sums in self.sums.values()]
        off = np.array([one.ratio - 1.0 for one in known])
        return dict(zip(self.sums, (1.0 + off * _significant_share(off, known)).tolist(), strict=True))


class DrafterChoice:
    """Whether all requests share one last drafter, and so passes, or each has its fastest."""

    def __init__(self) -> None:
        self._num_slots = TRIAL_SLOTS  # that this choice is old
        self._choice: Choice = _UNCHOSEN

    @property
    def is_settled(self) -> bool:
        """Whether the trial of the present choice is over."""
        return self._num_slots >= TRIAL_SLOTS

    def release(self) -> None:
        """Ends the trial: the choice was made before anything was known."""
        self._num_slots = TRIAL_SLOTS

    def choose(self, names: Sequence[str], per_token_s: Floats, places: Sequence[int], spread_overrun: float) -> Choice:
        """The choice for this slot; kept for TRIAL_SLOTS while available, or until spread requests are slower than said.
        Each is judged by where it would seat requests. ``per_token_s``: (requests, names); infinite where unavailable."""
        self._num_slots += 1
        rates: dict[Choice, float] = {}
        each = range(len(per_token_s))
        for choice in (*names, SPREAD):
            column = None if choice is SPREAD else names.index(choice)
            taken = seated(per_token_s, places, column)
            is_spread = len(set(taken)) > 1
            if column is None and not is_spread:
                continue
            can_be_had = column is None or (places[column] > 0 and bool(np.isfinite(per_token_s[:, column]).all()))
            rate = float(np.reciprocal(per_token_s[each, taken]).sum()) if can_be_had else 0.0
            rates[choice] = rate / spread_overrun if is_spread else rate
            if choice is SPREAD and self._choice is not SPREAD:
                rates[choice] /= _SPREAD_GAIN
        best = max(rates, key=rates.__getitem__)
        is_slow = self._choice is SPREAD and spread_overrun > 1.0
        if best != self._choice and (self.is_settled or is_slow or not rates.get(self._choice)):
            self._choice, self._num_slots = best, 0
        return self._choice


def seated(per_token_s: Floats, places: Sequence[int], chosen: int | None, last: Sequence[int] = ()) -> list[int]:
    """Column of each request, 0 being the target alone: the chosen drafter while it has places, else the fastest with one.
    Requests with the largest gain choose first, those in ``last`` last."""
    seconds = per_token_s.copy()
    if chosen is not None:
        seconds[:, chosen] = 0.0
    gains_s = per_token_s[:, 0] - (per_token_s.min(axis=1) if chosen is None else per_token_s[:, chosen])
    gains_s[list(last)] = -np.inf
    order = np.argsort(seconds, axis=1, kind="stable").tolist()
    free = [len(order), *places[1:]]
    taken: dict[int, int] = {}
    for i in np.argsort(-gains_s, kind="stable").tolist():
        taken[i] = next(j for j in order[i] if free[j] > 0)
        free[taken[i]] -= 1
    return [taken[i] for i in range(len(order))]


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


def profiled_passes(member: PoolMember, target: TableCost) -> TableCost:
    """Pass times of a drafter, from its profiled drafts; an unprofiled one counts as a small target."""
    if member.costs is None or not member.costs.draft_s:
        return target.scaled(member.cost)
    return monotone([(batch, seconds / member.max_draft_len) for batch, seconds in member.costs.draft_s])


class PassTimeFactors:
    """T_i: measured over profiled pass time of a model; SpecRouter's moving average. By octave of rows: profiled passes have
    one row of each request, and rows of a verification share their context."""

    def __init__(self, weight: float) -> None:
        self._memory = 1.0 / weight
        self._factors: dict[str, dict[int, DecayedMean]] = {}  # by drafter and octave

    def observe(self, report: LevelReport, expected_s: float) -> None:
        """``expected_s``: profiled seconds of one pass with the mean number of rows."""
        if report.num_passes and report.busy_s > 0.0 and expected_s > 0.0:
            measured = report.busy_s / report.num_passes / expected_s
            factors = self._factors.setdefault(report.drafter, {})
            mean = factors.setdefault(_octave(report.num_rows / report.num_passes), DecayedMean(self._memory))
            mean.add(mean.clipped(measured))

    def factor(self, drafter: str, num_rows: float) -> float:
        """That of the nearest octave that was measured."""
        factors, octave = self._factors.get(drafter), _octave(num_rows)
        return factors[min(factors, key=lambda other: abs(other - octave))].value if factors else 1.0

    def corrected(self, drafter: str, profiled: TableCost) -> TableCost:
        points = zip(profiled.rows, profiled.step_s_at, strict=True)
        return monotone([(rows, seconds * self.factor(drafter, rows)) for rows, seconds in points])


def _octave(num_rows: float) -> int:
    return round(num_rows).bit_length()


def _significant_share(off: Floats, known: Sequence[Compared]) -> Floats:
    """Share of the deviation ``off`` that counts: 0 where it may be chance."""
    num_free = sum(one.num_slots for one in known) - len(known)
    per_second = sum(one.residue for one in known) / num_free if num_free >= 1.0 else np.inf
    errors = np.array([per_second / one.predicted for one in known])  # squared, of the means
    shares: Floats = np.maximum(0.0, 1.0 - _NUM_ERRORS**2 * errors / np.maximum(off**2, 1e-300))
    shares *= np.minimum(1.0, [one.num_slots for one in known])
    return shares
