"""How many draft tokens of each proposal the next pass verifies."""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain

import numpy as np

from router.cost_model import CostModel
from router.plan import UNKNOWN_DRAFTER, Capacity, DrafterView, SequenceView

FEW = 64  # draft tokens of a pass, up to which plain Python is faster than numpy

VerificationPolicy = Callable[
    [Sequence[SequenceView], Mapping[str, DrafterView], Capacity, CostModel],
    dict[str, int],
]


def verify_all(
    ready: Sequence[SequenceView], drafters: Mapping[str, DrafterView], capacity: Capacity, cost: CostModel
) -> dict[str, int]:
    """Every useful draft token, in order of arrival, as far as the pass has room."""
    num_free = capacity.max_pass_tokens - len(ready)
    lengths = {}
    for sequence in ready:
        lengths[sequence.request_id] = max(0, min(useful_len(sequence, capacity), num_free))
        num_free -= lengths[sequence.request_id]
    return lengths


def verify_goodput(
    ready: Sequence[SequenceView], drafters: Mapping[str, DrafterView], capacity: Capacity, cost: CostModel
) -> dict[str, int]:
    """The lengths that maximise expected tokens per second of the pass over the whole batch (DSpark, section 3.2.2).

    Token i survives with its calibrated probability or, until calibrated, with a^(i+1), where a is the drafter's conditional
    acceptance. Tokens join in order of survival, which is optimal for each number of rows. The best number maximises

        E / step(rows)        E: expected tokens of the pass, bonus tokens included

    The output does not depend on the choice (DESIGN idea 1), so unlike the paper's scheduler the search continues beyond the
    first token that does not pay: another knee of the cost may follow.
    """
    num_ready, context = len(ready), sum(s.committed_len for s in ready)
    if not ready:
        return {}
    survivals: list[Sequence[float]] = []
    for sequence in ready:
        num_useful, survival = sequence.num_drafted, sequence.survival
        if num_useful >= sequence.max_new_tokens or num_useful + sequence.committed_len >= capacity.max_model_len:
            num_useful = useful_len(sequence, capacity)
        survivals.append(survival if len(survival) == num_useful else _survival(sequence, num_useful, drafters))
    room = max(0, capacity.max_pass_tokens - num_ready)
    few = sum(map(len, survivals)) <= FEW
    likeliest, expected = (_in_order_of_few if few else _in_order)(survivals, room)
    num_best = _best_number(expected, lambda num_joined: cost.step_s(num_ready + num_joined, context))
    if not num_best:
        return dict.fromkeys([sequence.request_id for sequence in ready], 0)
    lengths = (_lens_of_few if few else _lens)(survivals, likeliest[num_best - 1], num_best)
    return dict(zip([sequence.request_id for sequence in ready], lengths, strict=True))


def _in_order(survivals: Sequence[Sequence[float]], room: int) -> tuple[list[float], list[float]]:
    """Survival of the ``room`` likeliest draft tokens, descending, and expected tokens with the first n verified, from n =
    0."""
    likeliest = np.sort(np.fromiter(chain.from_iterable(survivals), np.float64))[::-1][:room]
    expected = np.cumsum(likeliest) + len(survivals)
    return likeliest.tolist(), [float(len(survivals)), *expected.tolist()]


def _in_order_of_few(survivals: Sequence[Sequence[float]], room: int) -> tuple[list[float], list[float]]:
    likeliest = sorted(chain.from_iterable(survivals), reverse=True)[:room]
    num = len(survivals)
    return likeliest, [float(num), *[num + total for total in accumulate(likeliest)]]


def _lens(survivals: Sequence[Sequence[float]], least: float, num_best: int) -> list[int]:
    """How many tokens of each proposal are among the ``num_best`` likeliest, the last of which survives with ``least``.
    Ties go to earlier tokens, then to earlier proposals."""
    flat = np.fromiter(chain.from_iterable(survivals), np.float64)
    joined = flat > least
    equals = np.flatnonzero(flat == least)
    joined[equals[: num_best - np.count_nonzero(joined)]] = True
    owners = np.repeat(np.arange(len(survivals)), np.fromiter(map(len, survivals), np.intp, len(survivals)))
    lengths: list[int] = np.bincount(owners[joined], minlength=len(survivals)).tolist()
    return lengths


def _lens_of_few(survivals: Sequence[Sequence[float]], least: float, num_best: int) -> list[int]:
    lengths = [sum([survival > least for survival in one]) for one in survivals]
    num_equals = num_best - sum(lengths)
    for i, one in enumerate(survivals):
        num = min(num_equals, one.count(least))
        lengths[i] += num
        num_equals -= num
    return lengths


def _best_number(tokens: Sequence[float], step_s: Callable[[int], float]) -> int:
    """The smallest n that maximises ``tokens[n] / step_s(n)``, both non-decreasing.

    Branch and bound: goodput in a range is at most the tokens of its last number over the time of its first. About 100
    evaluations for a thousand numbers.
    """
    last = len(tokens) - 1
    first_s = step_s(0)
    best, best_goodput = 0, tokens[0] / first_s
    ranges = [(-tokens[last] / first_s, 1, last, first_s)]  # not evaluated: bound, first, last, time before the first
    while ranges and -ranges[0][0] > best_goodput:
        _, low, high, low_s = heappop(ranges)
        if low > high:
            continue
        middle = (low + high) // 2
        middle_s = step_s(middle)
        goodput = tokens[middle] / middle_s
        if goodput > best_goodput or (goodput == best_goodput and middle < best):
            best, best_goodput = middle, goodput
        if low < middle:
            heappush(ranges, (-tokens[middle - 1] / low_s, low, middle - 1, low_s))
        if middle < high:
            heappush(ranges, (-tokens[high] / middle_s, middle + 1, high, middle_s))
    return best


def useful_len(sequence: SequenceView, capacity: Capacity) -> int:
    """Draft tokens that can be committed before max_tokens or the context's end; the bonus token comes after them."""
    room = capacity.max_model_len - sequence.committed_len
    return max(0, min(sequence.num_drafted, sequence.max_new_tokens - 1, room - 1))


def _survival(sequence: SequenceView, num_tokens: int, drafters: Mapping[str, DrafterView]) -> Sequence[float]:
    """Of the first ``num_tokens`` prefixes of a proposal; never rising."""
    if len(sequence.survival) >= num_tokens:
        return sequence.survival[:num_tokens]
    known = drafters.get(sequence.drafter, UNKNOWN_DRAFTER) if sequence.drafter else UNKNOWN_DRAFTER
    rate = min(max(known.acceptance, 0.01), 0.99)
    return [rate ** (i + 1) for i in range(num_tokens)]


VERIFICATION_POLICIES: dict[str, VerificationPolicy] = {"all": verify_all, "goodput": verify_goodput}
