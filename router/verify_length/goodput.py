"""`goodput`: the draft tokens that maximise expected tokens per second of the pass."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain

import numpy as np

from router.plan import SequenceView
from router.verify_length.context import PassRows, VerifyContext, survivals

FEW = 64  # draft tokens of a pass, up to which plain Python is faster than numpy


class Goodput:
    """The lengths that maximise expected tokens per second of the pass over the whole batch (DSpark, section 3.2.2).

    Tokens join in order of survival, which is optimal for each number of rows. The best number maximises

        E / step(rows)        E: expected tokens of the pass, bonus tokens included

    The output does not depend on the choice (DESIGN idea 1), so unlike the paper's scheduler the search continues beyond the
    first token that does not pay: another knee of the cost may follow.
    """

    def rows(self, ready: Sequence[SequenceView], context: VerifyContext) -> PassRows:
        return PassRows(self._lengths(ready, context), context.num_prompt_tokens)

    @staticmethod
    def _lengths(ready: Sequence[SequenceView], pass_: VerifyContext) -> dict[str, int]:
        num_ready, context, cost = len(ready), sum(s.committed_len for s in ready), pass_.cost
        if not ready:
            return {}
        known = survivals(ready, pass_)
        room = max(0, pass_.capacity.max_pass_tokens - num_ready)
        few = sum(map(len, known)) <= FEW
        likeliest, expected = (_in_order_of_few if few else _in_order)(known, room)
        num_best = _best_number(expected, lambda num_joined: cost.step_s(num_ready + num_joined, context))
        if not num_best:
            return dict.fromkeys([sequence.request_id for sequence in ready], 0)
        lengths = (_lens_of_few if few else _lens)(known, likeliest[num_best - 1], num_best)
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
