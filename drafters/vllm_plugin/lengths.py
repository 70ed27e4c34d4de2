"""How many draft tokens vLLM verifies of each request, by the measured time of its passes."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from sys import maxsize

from drafters.protocol import Draft
from profiler.online_cost import HALF_OCTAVES
from router.cost_model import TableCost, monotone
from router.drafting.verification import PassContext
from router.drafting.verification_rule import OutriderVerification
from router.estimates.decayed import RECENT, DecayedMean
from router.plan import Capacity, SequenceView

# Rows of a pass that take twice as long as one, where passes were not measured.
_DOUBLING_ROWS = {"cpu": 32}
_DOUBLING_ROWS_OF_OTHERS = 256
_STALE = 512  # passes of other numbers of rows, after which a mean is forgotten
_FIRST_PLAIN = 4  # passes without drafts at about one number of requests, before any are verified
_TRIAL_EVERY = 64  # passes


@dataclass(slots=True)
class _Range:
    """Passes of about one number of rows."""

    num_rows: DecayedMean = field(default_factory=lambda: DecayedMean(RECENT))
    seconds: DecayedMean = field(default_factory=lambda: DecayedMean(RECENT))
    last: int = 0  # number of its last pass


class PassTimes:
    """The mean time of passes by half octaves of rows; beyond those measured, in proportion to ``prior``."""

    def __init__(self, prior: TableCost) -> None:
        self._prior = prior
        self._ranges: defaultdict[int, _Range] = defaultdict(_Range)
        self._num_passes = 0

    def note(self, num_rows: int, seconds: float) -> None:
        if seconds > 0.0:
            self._num_passes += 1
            at = self._ranges[bisect_right(HALF_OCTAVES, num_rows)]
            at.num_rows.add(num_rows)
            at.seconds.add(at.seconds.clipped(seconds))
            at.last = self._num_passes
            for key in [key for key, one in self._ranges.items() if self._num_passes - one.last > _STALE]:
                del self._ranges[key]

    def table(self) -> TableCost:
        if not self._ranges:
            return self._prior
        points = [(round(one.num_rows.value), one.seconds.value) for one in self._ranges.values()]
        (first, first_s), (last, last_s) = min(points), max(points)
        points.append((2 * last, last_s * self._prior.at(2 * last) / self._prior.at(last)))
        if first > 1:
            points.append((1, first_s * self._prior.at(1) / self._prior.at(first)))
        return monotone(points)


@dataclass(slots=True)
class _Trials:
    """Passes with and without drafts at about one number of requests. Each is tried where none came by itself, since a time
    that was measured wrongly would stay."""

    num_plain: int = 0
    since_plain: int = 0
    since_drafted: int = 0

    @property
    def plain_is_due(self) -> bool:
        return self.num_plain < _FIRST_PLAIN or self.since_plain >= _TRIAL_EVERY

    @property
    def drafts_are_due(self) -> bool:
        return self.since_drafted >= _TRIAL_EVERY

    def note(self, is_plain: bool) -> None:
        self.num_plain += is_plain
        self.since_plain = 0 if is_plain else self.since_plain + 1
        self.since_drafted = self.since_drafted + 1 if is_plain else 0


@dataclass(frozen=True, slots=True)
class _Pass:
    began_s: float
    num_rows: int


@dataclass(slots=True)
class MeasuredLengths:
    """The lengths that maximise expected tokens per second (`router/drafting/verification_rule.py`).

    The time of a pass is what lies between two calls of the proposer, so it includes vLLM's scheduler. Only passes without
    prompts count. Drafts that vLLM shortened, for a grammar say, count as proposed.

    Args:
        device: as vLLM names it.
        max_pass_tokens: rows of a pass.
        clock: in seconds.
    """

    device: str
    max_pass_tokens: int
    clock: Callable[[], float]
    times: PassTimes = field(init=False)
    _rule: OutriderVerification = field(default_factory=OutriderVerification)
    _trials: defaultdict[int, _Trials] = field(default_factory=lambda: defaultdict(_Trials))  # by octave of requests
    _pass: _Pass | None = None  # that verifies the last drafts
    verified: dict[str, int] = field(default_factory=dict)  # draft tokens of each request in that pass

    def __post_init__(self) -> None:
        doubling = _DOUBLING_ROWS.get(self.device, _DOUBLING_ROWS_OF_OTHERS)
        self.times = PassTimes(TableCost((1, doubling), (1.0, 2.0)))

    def note_pass(self, only_decoded: bool) -> None:
        """The pass that verified the last drafts ended."""
        if self._pass is not None and only_decoded:
            self.times.note(self._pass.num_rows, self.clock() - self._pass.began_s)

    def choose(self, drafts: Sequence[Draft], committed_lens: Sequence[int]) -> list[int]:
        """Draft tokens of each request that the next pass verifies."""
        num, trials = len(drafts), self._trials[len(drafts).bit_length()]
        lens = [0] * num if trials.plain_is_due else self._best(drafts, committed_lens)
        if trials.drafts_are_due and not any(lens):
            lens = [min(1, len(draft.token_ids)) for draft in drafts]
        trials.note(not any(lens))
        self._pass = _Pass(self.clock(), num + sum(lens))
        self.verified = {draft.request_id: length for draft, length in zip(drafts, lens, strict=True)}
        return lens

    def _best(self, drafts: Sequence[Draft], committed_lens: Sequence[int]) -> list[int]:
        ready = [
            SequenceView(
                request_id=draft.request_id,
                committed_len=committed_len,
                computed_len=committed_len - 1,
                num_drafted=len(draft.token_ids),
                running=True,
                drafter=None,
                awaiting_since_s=None,
                max_new_tokens=len(draft.token_ids) + 1,
                survival=tuple(accumulate(draft.confidences, mul)),
            )
            for draft, committed_len in zip(drafts, committed_lens, strict=True)
        ]
        capacity = Capacity(1, 0, 0, len(ready), self.max_pass_tokens, max_model_len=maxsize)  # drafts fit the context
        context = PassContext({}, capacity, self.times.table(), now_s=0.0)
        return list(self._rule.rows(ready, context).verify_lens)
