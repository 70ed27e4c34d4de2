"""`dspark` and `dspark-async`: the hardware-aware prefix scheduler (DSpark, algorithm 1 and section 5.2)."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from router.cost_model import Floats
from router.drafting.ranking import Ranking, throughputs
from router.drafting.verification import PassContext, PassRows
from router.plan import SequenceView


class DSparkVerification:
    """Algorithm 1: admits draft tokens in order of survival and stops at the first that does not raise the throughput.

    The early stop keeps a rejection sampler unbiased (appendix A). It also ends the search before the next knee of a cost
    that is not smooth.
    """

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        if not ready:
            return PassRows([], context.num_prompt_tokens)
        ranking, throughput = throughputs(ready, context, context.limit_s)
        return PassRows(ranking.lens(_first_peak(throughput)), context.num_prompt_tokens)


class AsynchronousDSparkVerification:
    """Section 5.2: the K likeliest tokens of this pass, where K is the best number two passes ago, found without early stop.

    So the number is known before a pass ends, and does not depend on the tokens that it admits. Before a pass its likeliest
    tokens are selected by their newest survival; the search (``search``) runs beside it. The first two passes follow
    algorithm 1. Unlike in the paper, objectives of the present pass limit K.
    """

    def __init__(self) -> None:
        self._best: deque[int] = deque(maxlen=2)
        self._last: tuple[Sequence[SequenceView], PassContext] | None = None  # of a pass, to be searched

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        if not ready:
            return PassRows([], context.num_prompt_tokens)
        self.search()
        self._last = ready, context
        if len(self._best) < 2:
            return DSparkVerification().rows(ready, context)
        ranking = Ranking(ready, context, weighted=False)
        num = min(self._best[0], ranking.num_tokens)
        if num and context.limit_s is not None:
            table = context.cost.table(sum([one.committed_len for one in ready]))
            seconds = table.at_each(len(ready) + 1 + np.arange(num))
            num = int(np.count_nonzero(seconds <= context.limit_s))  # more rows are never faster
        return PassRows(ranking.lens(num), context.num_prompt_tokens)

    def search(self) -> None:
        if self._last is not None:
            ready, context = self._last
            self._last = None
            self._best.append(int(throughputs(ready, context, context.limit_s)[1].argmax()))


def _first_peak(throughput: Floats) -> int:
    stops = np.flatnonzero(throughput[1:] <= throughput[:-1])
    return int(stops[0]) if len(stops) else len(throughput) - 1
