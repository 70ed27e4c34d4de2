"""How many draft tokens of each proposal the next pass verifies."""

import heapq
from collections.abc import Callable, Mapping, Sequence

from router.cost_model import CostModel
from router.plan import UNKNOWN_DRAFTER, Capacity, DrafterView, SequenceView

VerificationPolicy = Callable[
    [Sequence[SequenceView], Mapping[str, DrafterView], Capacity, CostModel],
    dict[str, int],
]


def verify_all(
    ready: Sequence[SequenceView], drafters: Mapping[str, DrafterView], capacity: Capacity, cost: CostModel
) -> dict[str, int]:
    """Every draft token that can still matter, in order of arrival, as far as the pass has room."""
    num_free = capacity.max_pass_tokens - len(ready)
    lengths = {}
    for sequence in ready:
        lengths[sequence.request_id] = max(0, min(useful_len(sequence, capacity), num_free))
        num_free -= lengths[sequence.request_id]
    return lengths


def verify_goodput(
    ready: Sequence[SequenceView], drafters: Mapping[str, DrafterView], capacity: Capacity, cost: CostModel
) -> dict[str, int]:
    """The lengths that maximise expected tokens per second of the pass, over the batch as a whole.

    Token i of a proposal survives with probability a^(i+1), a the drafter's measured conditional acceptance. Tokens join
    in order of survival for as long as each pays for its row:
        (E + survival) / step(rows + 1) > E / step(rows),   E = expected tokens of the pass so far (bonus tokens included).
    Rows are cheap up to a knee and dear beyond it, so the best count is looked for beyond a flat stretch too.
    """
    context = sum(s.committed_len for s in ready)
    heap = []
    for order, sequence in enumerate(ready):
        limit = useful_len(sequence, capacity)
        if limit > 0:
            rate = _acceptance(sequence, drafters)
            heap.append((-rate, order, rate, limit))
    heapq.heapify(heap)
    joined: list[int] = []  # whose token each further row is
    num_best = 0
    expected = float(len(ready))
    best_goodput = expected / cost.step_s(len(ready), context) if ready else 0.0
    while heap and len(ready) + len(joined) < capacity.max_pass_tokens:
        negative, order, rate, limit = heapq.heappop(heap)
        joined.append(order)
        expected -= negative
        goodput = expected / cost.step_s(len(ready) + len(joined), context)
        if goodput > best_goodput:
            best_goodput, num_best = goodput, len(joined)
        if limit > 1:
            heapq.heappush(heap, (negative * rate, order, rate, limit - 1))
    lengths = {s.request_id: 0 for s in ready}
    for order in joined[:num_best]:
        lengths[ready[order].request_id] += 1
    return lengths


def useful_len(sequence: SequenceView, capacity: Capacity) -> int:
    """Draft tokens beyond the last wanted token, or the context's end, cannot be committed: the bonus token comes after."""
    room = capacity.max_model_len - sequence.committed_len
    return max(0, min(sequence.num_drafted, sequence.max_new_tokens - 1, room - 1))


def _acceptance(sequence: SequenceView, drafters: Mapping[str, DrafterView]) -> float:
    known = drafters.get(sequence.drafter, UNKNOWN_DRAFTER) if sequence.drafter else UNKNOWN_DRAFTER
    return min(max(known.acceptance, 0.01), 0.99)


VERIFICATION_POLICIES: dict[str, VerificationPolicy] = {"all": verify_all, "goodput": verify_goodput}
