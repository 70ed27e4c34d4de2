"""What became of a drafter's drafts, counted by a target and exported by ``/metrics``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, zip_longest

from cluster.histograms import Histogram, HistogramCounts, summed
from cluster.messages import NO_OUTCOMES, OutcomeReport
from cluster.types import MAX_DRAFT_LEN

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
    return DraftingCounts(
        _added([one.drafted for one in counts]),
        _added([one.verified for one in counts]),
        _added([one.accepted for one in counts]),
        sum([one.num_stale for one in counts]),
        sum([one.num_late for one in counts]),
        sum([one.num_resyncs for one in counts]),
        sum(known) / len(known) if known else None,
        summed([one.hold_s for one in counts]) or _NO_TIMES,
        summed([one.reply_s for one in counts]) or _NO_TIMES,
        summed([one.batch_s for one in counts]) or _NO_TIMES,
        reduce(OutcomeReport.plus, [one.outcomes for one in counts], NO_OUTCOMES),
        summed([one.link_s for one in counts]) or _NO_TIMES,
        sum([one.num_fed for one in counts]),
        sum([one.fed_bytes for one in counts]),
    )


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple([sum(column) for column in zip_longest(*counts, fillvalue=0)])


def _trimmed(counts: list[int]) -> tuple[int, ...]:
    length = len(counts)
    while length and not counts[length - 1]:
        length -= 1
    return tuple(counts[:length])


def _by_position(by_len: tuple[int, ...]) -> list[int]:
    """How many lengths exceed each position."""
    return list(accumulate(reversed(by_len[1:])))[::-1]
