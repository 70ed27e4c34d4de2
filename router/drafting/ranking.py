"""The draft tokens of a pass in order of survival, and how long passes take that verify the first n of them.

Survival never rises along a proposal, so the first n are a prefix of each, and no other n have more expected tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from struct import pack

import numpy as np

from router.cost_model import Floats
from router.drafting.verification import VerifyContext, survivals
from router.plan import SequenceView

FEW = 64  # draft tokens of a pass, up to which plain Python is faster than numpy


class Ranking:
    """The draft tokens that a pass has room for, the likeliest first; with weights, those that bring most.

    ``expected[n]``: weighted tokens of the pass with the first n verified, bonus tokens included.
    """

    def __init__(self, ready: Sequence[SequenceView], context: VerifyContext, room: int, weighted: bool = True) -> None:
        self._values = survivals(ready, context)
        plain = float(len(ready))
        if weighted and context.weights:
            weights = [context.weights.get(sequence.request_id, 1.0) for sequence in ready]
            self._values = [[w * s for s in one] for w, one in zip(weights, self._values, strict=True)]
            plain = sum(weights)
        self._likeliest: Sequence[float] | Floats
        self.expected: Sequence[float] | Floats
        self._flat: Floats | None = None
        self._lens = list(map(len, self._values))
        num_tokens = sum(self._lens)
        self.is_short = num_tokens <= FEW
        if self.is_short:
            self._likeliest = sorted(chain.from_iterable(self._values), reverse=True)[:room]
            self.expected = list(accumulate(self._likeliest, initial=plain))
        else:
            # 31 us for 1,792 floats, which np.fromiter reads in 52 (level amx).
            self._flat = np.frombuffer(pack(f"{num_tokens}d", *chain.from_iterable(self._values)))
            self._likeliest = np.sort(self._flat)[::-1][:room]
            self.expected = np.empty(len(self._likeliest) + 1)
            self.expected[0] = 0.0
            np.cumsum(self._likeliest, out=self.expected[1:])
            self.expected += plain

    @property
    def num_tokens(self) -> int:
        return len(self._likeliest)

    def lens(self, num_first: int) -> list[int]:
        """How many tokens of each proposal are among the first. Ties go to earlier tokens, then to earlier proposals."""
        if not num_first:
            return [0] * len(self._lens)
        least = float(self._likeliest[num_first - 1])
        if self._flat is None:
            return _lens_of_few(self._values, least, num_first)
        return _lens(self._flat, self._lens, least, num_first)


def throughputs(
    ready: Sequence[SequenceView], context: VerifyContext, limit_s: float | None, drafting_s: float = 0.0
) -> tuple[Ranking, Floats]:
    """Estimated tokens per second with the n likeliest draft tokens, from n = 0; -1 where pass and ``drafting_s``, the time
    that the drafts took, exceed ``limit_s`` together (AdaSpec, algorithm 3)."""
    room = max(0, context.capacity.max_pass_tokens - len(ready))
    ranking = Ranking(ready, context, room, weighted=False)
    table = context.cost.table(sum([sequence.committed_len for sequence in ready]))
    seconds = drafting_s + table.at_each(np.arange(len(ready), len(ready) + ranking.num_tokens + 1))
    rates: Floats = np.asarray(ranking.expected) / seconds
    return ranking, rates if limit_s is None else np.where(seconds <= limit_s, rates, -1.0)


def _lens(flat: Floats, proposal_lens: Sequence[int], least: float, num_first: int) -> list[int]:
    joined = flat > least
    equals = np.flatnonzero(flat == least)
    joined[equals[: num_first - np.count_nonzero(joined)]] = True
    owners = np.repeat(np.arange(len(proposal_lens)), proposal_lens)
    lengths: list[int] = np.bincount(owners[joined], minlength=len(proposal_lens)).tolist()
    return lengths


def _lens_of_few(values: Sequence[Sequence[float]], least: float, num_first: int) -> list[int]:
    lengths = [sum([value > least for value in one]) for one in values]
    num_equals = num_first - sum(lengths)
    for i, one in enumerate(values):
        num = min(num_equals, list(one).count(least))
        lengths[i] += num
        num_equals -= num
    return lengths
