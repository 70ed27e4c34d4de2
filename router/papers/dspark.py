"""`dspark` and `dspark-async`: the hardware-aware prefix scheduler (DSpark, algorithm 1 and section 5.2)."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from router.cost_model import Floats
from router.drafting.ranking import throughputs
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

    So the number is known before a pass ends, and does not depend on the tokens that it admits. The first two passes follow
    algorithm 1.
    """

    def __init__(self) -> None:
        self._best: deque[int] = deque(maxlen=2)

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        if not ready:
            return PassRows([], context.num_prompt_tokens)
        ranking, throughput = throughputs(ready, context, context.limit_s)
        chosen = self._best[0] if len(self._best) == 2 else _first_peak(throughput)
        self._best.append(int(throughput.argmax()))
        num_allowed = int(np.count_nonzero(throughput >= 0.0)) - 1  # within the limit: more rows are never faster
        return PassRows(ranking.lens(max(0, min(chosen, num_allowed))), context.num_prompt_tokens)


def _first_peak(throughput: Floats) -> int:
    stops = np.flatnonzero(throughput[1:] <= throughput[:-1])
    return int(stops[0]) if len(stops) else len(throughput) - 1
