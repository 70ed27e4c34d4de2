"""`adaspec`: eliminate the draft tokens that are least likely to be accepted (AdaSpec, algorithms 2 and 3)."""

from collections.abc import Sequence

import numpy as np

from router.plan import SequenceView
from router.verify_length.context import PassRows, VerifyContext
from router.verify_length.ranking import Floats, Ranking, pass_times


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


def throughputs(ready: Sequence[SequenceView], context: VerifyContext, limit_s: float | None) -> tuple[Ranking, Floats]:
    """Algorithm 3: estimated tokens per second with the n likeliest draft tokens, from n = 0; -1 where the pass exceeds
    ``limit_s``, the TPOT constraint."""
    room = max(0, context.capacity.max_pass_tokens - len(ready))
    ranking = Ranking(ready, context, room, weighted=False)
    table = context.cost.table(sum([sequence.committed_len for sequence in ready]))
    seconds = pass_times(table, len(ready), ranking.num_tokens, context.capacity.prepared_rows)
    rates: Floats = np.asarray(ranking.expected) / seconds
    return ranking, rates if limit_s is None else np.where(seconds <= limit_s, rates, -1.0)
