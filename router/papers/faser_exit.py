"""How deep to verify: the thresholds of token-wise early exit (FASER, arXiv 2604.20503, section 4.2), learned from passes
that computed every row through all layers.

A check after some layer estimates, for each row that a draft token follows, by how much another token beats that draft
token: its margin. The first row of a span whose margin exceeds the threshold of the check stays, since its own token
decides; the rows behind it leave the pass.

FASER's equation 10 asks that the saved time exceeds the pruning overhead. Here a set of thresholds is worth

    sum over spans of    rows that leave * time that they would still take                  (equation 9)
                       - rows that are checked * time of a check                            (T_ee and T_pr)
                       - (accepted tokens that are lost, PRIOR_LOST for each check that may err) * time of a token

on the sampled spans. Where that is positive by a margin, the thresholds are tried: passes with exits take turns with whole
passes, and are used only where they were measured to be faster, lost tokens added (`router.estimates.trial`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.types import record

DEPTHS = (0.8, 0.9, 1.0)  # of the layers, where checks may lie; L_init is the first that pays
VOCABULARY_LEN = 1024  # the most frequent tokens; of them, the best competes with the drafted token
NUM_SWEEPS = 2
# Candidate thresholds: these quantiles of the margins of accepted draft tokens, so 0.95 loses one in twenty there.
QUANTILES = (0.6, 0.75, 0.85, 0.9, 0.94, 0.96, 0.98, 0.99, 1.0)
MIN_GAIN = 0.05  # least saving, as a share of the time of the pass: the estimates leave out, for one, packing rows anew
WRONG_FACTOR = 2.0
MIN_WRONG_SHARE = 0.02
MAX_EXCESS = 6.0  # cuts
# Tokens that each check but the last is taken to have lost on the samples beside those that it did: few samples hide some.
PRIOR_LOST = 8.0

Thresholds = tuple[float | None, ...]  # by check; None: that check is left out


@dataclass(frozen=True, slots=True)
class ExitSamples:
    """Spans of passes that computed every row through all layers. The margin of draft i is that of the row before it."""

    margins: NDArray[np.float32]  # [spans, checks, drafts], -inf behind a span's last draft
    num_drafts: NDArray[np.int64]  # [spans]
    num_accepted: NDArray[np.int64]  # [spans]

    def __len__(self) -> int:
        return len(self.num_drafts)


@record
class ExitPrices:
    """Of a pass of some size, in seconds. ``remaining``: share of a row's time that is still to come after each check, of
    which the last one is after all layers and exact."""

    pass_s: float  # per span
    row_s: float  # of one row more
    check_s: float  # of one row in one check
    remaining: tuple[float, ...]


@record
class ExitPlan:
    """All thresholds are None where exits do not pay. The samples include requests that exit passes leave unchecked.

    Args:
        saved_share: of the time of a pass, PRIOR_LOST charged.
        wrong_share: of the sampled spans that are cut, those that lose a token.
    """

    thresholds: Thresholds
    saved_share: float = 0.0
    wrong_share: float = 0.0

    @property
    def is_off(self) -> bool:
        return all(threshold is None for threshold in self.thresholds)


def choose_thresholds(samples: ExitSamples, prices: ExitPrices) -> ExitPlan:
    """The thresholds worth most on the samples, by coordinate ascent from the deepest check, whose estimates are best."""
    num_checks = len(prices.remaining)
    off = ExitPlan((None,) * num_checks)
    if not len(samples):
        return off
    candidates = [_candidates(samples, check) for check in range(num_checks)]
    best = list(off.thresholds)
    best_s = 0.0
    for _ in range(NUM_SWEEPS):
        for check in reversed(range(num_checks)):
            for threshold in (None, *candidates[check]):
                tried = [*best[:check], threshold, *best[check + 1 :]]
                saved_s = saved_per_span_s(samples, prices, tried)
                if saved_s > best_s:
                    best, best_s = tried, saved_s
    share = best_s / prices.pass_s
    if share < MIN_GAIN:
        return off
    kept = kept_drafts(samples, best)
    num_cut, num_wrong = int((kept < samples.num_drafts).sum()), int((kept < samples.num_accepted).sum())
    return ExitPlan(tuple(best), share, num_wrong / num_cut)


class WrongExits:
    """Notices that drafts became better than those that thresholds were learned from: exit passes show which cuts lost a
    token. One-sided cumulative sum of the wrong cuts beyond WRONG_FACTOR times the expected share."""

    def __init__(self) -> None:
        self._excess = 0.0

    def note(self, plan: ExitPlan, num_cut: int, num_wrong: int) -> bool:
        """Returns whether to learn anew; the sum then restarts."""
        expected = WRONG_FACTOR * max(plan.wrong_share, MIN_WRONG_SHARE) * num_cut
        self._excess = max(0.0, self._excess + num_wrong - expected)
        if self._excess < MAX_EXCESS:
            return False
        self._excess = 0.0
        return True


def saved_per_span_s(samples: ExitSamples, prices: ExitPrices, thresholds: Sequence[float | None]) -> float:
    """Mean saving of the samples' spans under ``thresholds``; negative: a loss."""
    alive = samples.num_drafts
    saved_rows = checked_rows = 0.0
    for check, threshold in enumerate(thresholds):
        if threshold is None:
            continue
        checked_rows += float(alive.sum())
        kept = np.minimum(alive, first_above(samples.margins[:, check], threshold))
        saved_rows += prices.remaining[check] * float((alive - kept).sum())
        alive = kept
    num_lost = float(np.maximum(0, samples.num_accepted - alive).sum())
    num_lost += PRIOR_LOST * sum([threshold is not None for threshold in thresholds[:-1]])
    token_s = prices.pass_s / (1.0 + float(samples.num_accepted.mean()))
    return (saved_rows * prices.row_s - checked_rows * prices.check_s - num_lost * token_s) / len(samples)


def kept_drafts(samples: ExitSamples, thresholds: Sequence[float | None]) -> NDArray[np.int64]:
    """Drafts of each span that are verified, [spans]."""
    kept = samples.num_drafts
    for check, threshold in enumerate(thresholds):
        if threshold is not None:
            kept = np.minimum(kept, first_above(samples.margins[:, check], threshold))
    return kept


def first_above(margins: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """The first draft of each span whose margin exceeds the threshold, [spans]; the number of columns: none does."""
    above = margins > threshold
    first: NDArray[np.int64] = np.where(above.any(1), above.argmax(1), margins.shape[1])
    return first


def _candidates(samples: ExitSamples, check: int) -> list[float]:
    margins = samples.margins[:, check]
    accepted = margins[np.arange(margins.shape[1]) < samples.num_accepted[:, None]]
    if not len(accepted):
        return [0.0]
    return sorted({0.0, *np.maximum(0.0, np.quantile(accepted, QUANTILES)).tolist()})
