"""When a drafter ends its drafts: the target's terms, and what the drafter has learned of itself."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from drafters.protocol import Demand
from engine.acceptance import common_prefix_len
from router.drafting.stopping import DraftProgress, continuing
from router.estimates.decayed import LASTING, DecayedMean
from router.estimates.draft_times import DraftTimes
from router.estimates.drafter_stats import MIN_RECORDS
from router.estimates.survival import OnlineSurvival


class DraftStops:
    """Of one drafter: calibrates its confidences by the commits that follow its drafts, times its steps, and decides after
    each step which drafts go on."""

    def __init__(self) -> None:
        self._calibration = OnlineSurvival()
        self._right = DecayedMean(LASTING)  # of draft tokens, given that those before were
        self._times = DraftTimes()
        self._drafts: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {}  # the last one on committed tokens

    def note_step(self, batch: int, seconds: float) -> None:
        """A draft step for so many requests took so long."""
        self._times.add(batch, seconds)

    def note_draft(self, demand: Demand, token_ids: Sequence[int], confidences: Sequence[float]) -> None:
        if not demand.ahead and token_ids:
            self._drafts[demand.request_id] = tuple(token_ids), tuple(confidences)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Learns from newly committed tokens what became of the last draft."""
        draft = self._drafts.pop(request_id, None)
        if draft is None:
            return
        drafted, confidences = draft
        num_right = common_prefix_len(drafted, token_ids)
        num_judged = min(num_right + 1, len(drafted), len(token_ids))
        for i in range(num_judged):
            self._right.add(float(i < num_right))
        self._calibration.record(confidences[:num_judged], num_right)

    def forget(self, request_id: str) -> None:
        self._drafts.pop(request_id, None)

    def continuing(
        self, demands: Sequence[Demand], confidences: Sequence[Sequence[float]], is_open: Sequence[bool], num_steps: int
    ) -> list[bool]:
        """Which drafts of a batch get another token. ``confidences``: of the tokens of each so far, at least one.
        ``is_open``: which want more."""
        batch = [self._progress(*one) for one in zip(demands, confidences, is_open, strict=True)]
        usual = self._right.value if self._right.num >= MIN_RECORDS else 1.0
        return continuing(batch, self._times.at(sum(is_open)), num_steps, usual)

    def _progress(self, demand: Demand, confidences: Sequence[float], is_open: bool) -> DraftProgress:
        given = [demand.survival * survival for survival in accumulate(confidences, mul)]
        survival = given[-1]
        if self._calibration.num_records >= MIN_RECORDS:
            survival = demand.survival * self._calibration.survival([confidences])[0][-1]
        expected_len = sum(given)
        return DraftProgress(demand.terms, survival, confidences[-1], given[-1], expected_len, len(confidences), is_open)


def cut_lens(demands: Sequence[Demand], drafted: Sequence[Sequence[float]], stops: DraftStops) -> list[int]:
    """Lengths of drafts that were made at once, had they been made step by step. ``drafted``: the confidences of each."""
    lens = [min(1, len(confidences)) for confidences in drafted]
    live = [i for i, length in enumerate(lens) if length]
    num_steps = 1
    while live:
        is_open = [lens[i] == num_steps < len(drafted[i]) for i in live]
        if not any(is_open):
            break
        so_far = [drafted[i][: lens[i]] for i in live]
        goes_on = stops.continuing([demands[i] for i in live], so_far, is_open, num_steps)
        for i, one in zip(live, goes_on, strict=True):
            lens[i] += one
        num_steps += 1
    return lens
