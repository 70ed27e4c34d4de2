"""What a process counts and others sum, shipped with the status and exported by ``/metrics``: histograms, what became of a
drafter's drafts, and the attainment of service-level objectives."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import accumulate, zip_longest
from typing import Any, Self

from cluster.messages import NO_OUTCOMES, OutcomeReport
from cluster.types import MAX_DRAFT_LEN, Slo


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """``counts[i]``: values above ``bounds[i - 1]`` and at most ``bounds[i]``; the last count has those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0  # sum of the values

    def plus(self, other: "HistogramCounts") -> Self:
        """Raises ValueError unless both have the same bounds."""
        if other.bounds != self.bounds:
            raise ValueError(f"histograms of bounds {self.bounds} and {other.bounds} cannot be added")
        counts = tuple([mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)])
        return type(self)(self.bounds, counts, self.total + other.total)

    def cumulative(self) -> list[int]:
        """Values at most each bound; then all."""
        return list(accumulate(self.counts))


class Histogram:
    """Other threads may call ``snapshot``; a value that is noted meanwhile may be in the counts and not yet in the total."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def note(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


# Upper bounds in seconds.
SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_NO_TIMES = HistogramCounts(SHORT_S, (0,) * (len(SHORT_S) + 1))


@dataclass(frozen=True, slots=True)
class DraftingCounts:
    """Since the target's start. The tuples are indexed by length: entry n counts drafts of n tokens. Trailing zeros are left
    out."""

    drafted: tuple[int, ...] = ()  # proposals that were taken
    verified: tuple[int, ...] = ()  # drafts that a pass verified, by the tokens that it verified
    accepted: tuple[int, ...] = ()  # of the same drafts, by the tokens that were accepted
    num_stale: int = 0  # proposals that came too late
    num_late: int = 0  # holds that expired before the proposal came
    num_resyncs: int = 0
    acceptance: float | None = None  # moving average, of a token whose predecessors were right; None: nothing was judged
    hold_s: HistogramCounts = _NO_TIMES  # waits of requests for a proposal
    reply_s: HistogramCounts = _NO_TIMES  # from the commit to the arrival of the proposal
    batch_s: HistogramCounts = _NO_TIMES  # of drafting a batch, as the drafter measures it
    outcomes: OutcomeReport = NO_OUTCOMES  # that the drafter prepared
    link_s: HistogramCounts = _NO_TIMES  # that a batch of drafts waited for hidden states on the tensor link
    num_fed: int = 0  # tokens whose hidden states were sent
    fed_bytes: int = 0

    @property
    def verified_at(self) -> list[int]:
        """Draft tokens verified, by position in the draft from 0."""
        return _by_position(self.verified)

    @property
    def accepted_at(self) -> list[int]:
        """Draft tokens accepted, by position in the draft from 0."""
        return _by_position(self.accepted)


NO_DRAFTS = DraftingCounts()


class DraftingTally:
    """Owned by the round; other threads may call ``counts``. The lists are indexed by length, as in DraftingCounts."""

    def __init__(self) -> None:
        self.drafted = [0] * (MAX_DRAFT_LEN + 1)
        self.verified = [0] * (MAX_DRAFT_LEN + 1)
        self.accepted = [0] * (MAX_DRAFT_LEN + 1)
        self.hold_s = Histogram(SHORT_S)
        self.reply_s = Histogram(SHORT_S)
        self.batch_s = Histogram(SHORT_S)
        self.link_s = Histogram(SHORT_S)
        self.num_fed = self.fed_bytes = 0
        self.outcomes = NO_OUTCOMES

    def note_drafted(self, draft_len: int) -> None:
        """Adds a proposal that was taken. Longer ones than are possible count as the longest, here and below."""
        self.drafted[min(draft_len, MAX_DRAFT_LEN)] += 1

    def note_verified(self, num_verified: int, num_accepted: int) -> None:
        """Adds a draft that a pass verified, of at least one token."""
        self.verified[min(num_verified, MAX_DRAFT_LEN)] += 1
        self.accepted[min(num_accepted, MAX_DRAFT_LEN)] += 1

    def counts(self, num_stale: int, num_late: int, num_resyncs: int, acceptance: float | None) -> DraftingCounts:
        return DraftingCounts(
            _trimmed(self.drafted),
            _trimmed(self.verified),
            _trimmed(self.accepted),
            num_stale,
            num_late,
            num_resyncs,
            acceptance,
            self.hold_s.snapshot(),
            self.reply_s.snapshot(),
            self.batch_s.snapshot(),
            self.outcomes,
            self.link_s.snapshot(),
            self.num_fed,
            self.fed_bytes,
        )


def merged(counts: Sequence[DraftingCounts]) -> DraftingCounts:
    """Over several targets. ``acceptance``: the mean of those that know it."""
    known = [one.acceptance for one in counts if one.acceptance is not None]
    found: dict[str, Any] = {"acceptance": sum(known) / len(known) if known else None}
    for name, none in ((one.name, one.default) for one in fields(DraftingCounts)):
        values = [getattr(one, name) for one in counts]
        if isinstance(none, tuple):
            found[name] = tuple([sum(column) for column in zip_longest(*values, fillvalue=0)])
        elif isinstance(none, HistogramCounts | OutcomeReport):
            found[name] = reduce(lambda one, other: one.plus(other), values, none)
        elif name not in found:
            found[name] = sum(values)
    return DraftingCounts(**found)


def _trimmed(counts: list[int]) -> tuple[int, ...]:
    length = len(counts)
    while length and not counts[length - 1]:
        length -= 1
    return tuple(counts[:length])


def _by_position(by_len: tuple[int, ...]) -> list[int]:
    """How many lengths exceed each position."""
    return list(accumulate(reversed(by_len[1:])))[::-1]


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
