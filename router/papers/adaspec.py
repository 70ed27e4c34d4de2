"""AdaSpec: how far to draft (section 5.1, algorithm 1) and how much to verify (algorithms 2 and 3).

As in the paper: T_sd = T_d + T_v (equation 1) on both sides; NAT, where a token is accepted with the product of the
confidences up to it (6, 7), here calibrated ones; the elimination of algorithm 2; -1 for a round beyond TPOT (algorithm 3).

Differently:
- Times are the cost model's, measured, not a linear fit (2 to 4). It counts the context of a request once a pass, as
  attention reads it, so that the square of the length in T_sd (5) has no term of its own.
- The adaptive drafter (algorithm 1) predicts, executes and corrects by itself (`router/drafting/stopping.py`): the target
  tells it what a row and a second cost, in tokens of plain decoding, and the mean confidence of former drafts. TPOT reaches
  it as the longest draft whose round meets it.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cluster.types import DraftTerms
from router.assignment import drafter_of
from router.drafting.length import DraftLengths, PassFeedback, decoding
from router.drafting.ranking import throughputs
from router.drafting.value import PRICE_STEPS, DraftingValue, QuotedPrice
from router.drafting.verification import PassContext, PassRows
from router.estimates.decayed import LASTING, DecayedMean
from router.plan import SequenceView

_FIRST_CONFIDENCE = 0.8  # before any is known
_SHARE = 0.1  # quoted figures stay while the true ones are so near


class AdaSpec(DraftLengths):
    """``max_lens`` as of the base.

    The price of a row is the mean of a row more for each request, and the drafter measures its own steps. As in the paper,
    every second of drafting counts.
    """

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        super().__init__(max_lens)
        self._confidence = DecayedMean(LASTING)
        self._quoted_row = QuotedPrice(_SHARE, 1 / PRICE_STEPS)
        self._quoted_second = QuotedPrice(_SHARE)
        self._quoted_confidence = QuotedPrice(least=0.02)
        self._ready: list[SequenceView] = []

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        sequences = list(sequences)
        ready = self._ready = decoding(sequences)
        if ready:
            num, context = len(ready), sum(s.committed_len for s in ready)
            plain_s = value.cost.step_s(num, context)
            row_s = (value.cost.step_s(2 * num, context) - plain_s) / num
            # A plain pass decodes a token of each request in plain_s.
            self._quoted_row.follow(min(1.0, row_s * num / plain_s))
            self._quoted_second.follow(1.0 / plain_s)
        expected = self._confidence.value if self._confidence.is_known else _FIRST_CONFIDENCE
        self._quoted_confidence.follow(expected)
        return super().budgets(sequences, value)

    def budget_of(self, drafter: str, value: DraftingValue) -> DraftTerms:
        prices, longest = (self._quoted_row.value, self._quoted_second.value), self._longest(drafter, value)
        return DraftTerms(longest, *prices, expected_confidence=self._quoted_confidence.value)

    def _longest(self, drafter: str, value: DraftingValue) -> int:
        """The longest draft of all requests whose round meets the TPOT objective; without one, the drafter's longest."""
        longest, tpot_s = self.max_len(drafter), value.limits.tpot_s
        if tpot_s is None or not self._ready:
            return longest
        num, context = len(self._ready), sum([s.committed_len for s in self._ready])
        num_own = max(1, sum([s.drafter == drafter for s in self._ready]))
        for length in range(longest, 0, -1):
            verify_s = value.cost.step_s(num * (1 + length), context)
            if value.draft_s(drafter, num_own, length) + verify_s <= tpot_s:
                return length
        # One whose times are not profiled is tried on: else a slow first draft would stand for all.
        return 0 if value.cost.draft_s(drafter_of(drafter), num_own, 1) is not None else 1

    def learn(self, feedback: PassFeedback) -> None:
        for judgement in feedback.judgements.values():
            for confidence in judgement.confidences:
                self._confidence.add(confidence)


class AdaSpecVerification:
    """Removes draft tokens in ascending order of acceptance, as long as each removal raises the estimated throughput.

    The throughput of n tokens is NAT / T_sd, and -1 if T_sd exceeds the TPOT constraint (algorithm 3, line 3). In the paper
    two sets that both exceed it compare equal, which ends the elimination with a set that exceeds it; here it goes on.
    """

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        if not ready:
            return PassRows([], context.num_prompt_tokens)
        ranking, throughput = throughputs(ready, context, context.tpot_s, _drafting_s(ready, context))
        removing_pays = (throughput[:-1] > throughput[1:]) | (throughput[1:] < 0)
        kept = np.flatnonzero(~removing_pays)  # n: of n + 1 tokens, the last is not removed
        return PassRows(ranking.lens(int(kept[-1]) + 1 if len(kept) else 0), context.num_prompt_tokens)


def _drafting_s(ready: Sequence[SequenceView], context: PassContext) -> float:
    """T_d of the proposals at hand: drafters work beside each other, each for all its requests as far as its longest."""
    proposals: dict[str, list[int]] = {}
    for sequence in ready:
        if sequence.drafter is not None and sequence.num_drafted:
            proposals.setdefault(sequence.drafter, []).append(sequence.num_drafted)
    value = context.value
    return max([0.0, *[value.draft_s(name, len(lens), max(lens)) for name, lens in proposals.items()]])
