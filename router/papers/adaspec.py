"""AdaSpec: how far to draft (section 5.1, algorithm 1) and how much to verify (algorithms 2 and 3).

The drafter predicts, executes and corrects. The target tells it what a row and a second cost, in tokens of plain decoding,
and the mean confidence of former drafts. It drafts a step for the whole batch while the predicted throughput
rises, and corrects the prediction by the confidences of each step (`router/drafting/stopping.py`).
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cluster.types import StopRule
from router.drafting.length import BatchState, DraftLengths, PassFeedback, decoding
from router.drafting.prices import QuotedPrice
from router.drafting.ranking import throughputs
from router.drafting.verification import PassRows, VerifyContext
from router.estimates.decayed import LASTING, DecayedMean
from router.plan import DraftBudget, SequenceView

_FIRST_CONFIDENCE = 0.8  # before any is known
_SHARE = 0.1  # quoted figures stay while the true ones are so near


class AdaSpec(DraftLengths):
    """``max_lens`` as of the base.

    Other than the paper's fit (equation 2), times come from the cost model: the marginal row is the mean of a row more for
    each request, and the drafter measures its own steps. As in the paper, every second of drafting counts.
    """

    def __init__(self, max_lens: Mapping[str, int] | None = None) -> None:
        super().__init__(max_lens)
        self._confidence = DecayedMean(LASTING)
        self._quoted_row = QuotedPrice(_SHARE, 1 / 64)
        self._quoted_second = QuotedPrice(_SHARE, 0.0)
        self._quoted_confidence = QuotedPrice(0.0, 0.02)

    def budgets(self, sequences: Iterable[SequenceView], batch: BatchState) -> dict[str, DraftBudget]:
        sequences = list(sequences)
        ready = decoding(sequences)
        if ready:
            num, context = len(ready), sum(s.committed_len for s in ready)
            plain_s = batch.cost.step_s(num, context)
            row_s = (batch.cost.step_s(2 * num, context) - plain_s) / num
            # A plain pass decodes a token of each request in plain_s.
            self._quoted_row.follow(min(1.0, row_s * num / plain_s))
            self._quoted_second.follow(1.0 / plain_s)
        expected = self._confidence.value if self._confidence.is_known else _FIRST_CONFIDENCE
        self._quoted_confidence.follow(expected)
        return super().budgets(sequences, batch)

    def budget_of(self, drafter: str, batch: BatchState) -> DraftBudget:
        stop = StopRule(self._quoted_second.value, expected_confidence=self._quoted_confidence.value)
        return DraftBudget(self.max_len(drafter), self._quoted_row.value, stop)

    def learn(self, feedback: PassFeedback) -> None:
        for judgement in feedback.judgements.values():
            for confidence in judgement.confidences:
                self._confidence.add(confidence)


class AdaSpecVerification:
    """Removes draft tokens in ascending order of acceptance, as long as each removal raises the estimated throughput.

    The throughput of n tokens is NAT / t, and -1 if t exceeds the TPOT constraint (algorithm 3, line 3). In the paper two
    sets that both exceed it compare equal, which ends the elimination with a set that exceeds it; here it goes on.
    """

    def rows(self, ready: Sequence[SequenceView], context: VerifyContext) -> PassRows:
        if not ready:
            return PassRows([], context.num_prompt_tokens)
        ranking, throughput = throughputs(ready, context, context.tpot_s)
        removing_pays = (throughput[:-1] > throughput[1:]) | (throughput[1:] < 0)
        kept = np.flatnonzero(~removing_pays)  # n: of n + 1 tokens, the last is not removed
        return PassRows(ranking.lens(int(kept[-1]) + 1 if len(kept) else 0), context.num_prompt_tokens)
