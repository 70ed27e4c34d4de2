"""The draft tokens of a pass in order of survival, and how long passes take that verify the first n of them.

Survival never rises along a proposal, so the first n are a prefix of each, and no other n have more expected tokens.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from struct import pack

import numpy as np
from numpy.typing import NDArray

from cluster.types import record
from router.cost_model import Floats
from router.drafting.verification import PassContext, survivals
from router.plan import SequenceView


class Ranking:
    """The draft tokens that a pass has room for, the likeliest first; with weights, those that bring most. They are sorted
    where ``expected`` is read; ``lens`` only selects."""

    def __init__(
        self, ready: Sequence[SequenceView], context: PassContext, room: int | None = None, weighted: bool = True
    ) -> None:
        values = survivals(ready, context)
        self._plain = float(len(ready))
        if weighted and context.weights:
            weights = [context.weights.get(sequence.request_id, 1.0) for sequence in ready]
            values = [[w * s for s in one] for w, one in zip(weights, values, strict=True)]
            self._plain = sum(weights)
        self._lens = list(map(len, values))
        # 31 us for 1,792 floats, which np.fromiter reads in 52 (level amx).
        self._values = np.frombuffer(pack(f"{sum(self._lens)}d", *chain.from_iterable(values)))
        left = max(0, context.capacity.max_pass_tokens - len(ready)) if room is None else room
        self.num_tokens = min(left, len(self._values))

    @cached_property
    def expected(self) -> Floats:
        """``expected[n]``: weighted tokens of the pass with the first n verified, bonus tokens included."""
        expected = np.zeros(self.num_tokens + 1)
        np.cumsum(np.sort(self._values)[::-1][: self.num_tokens], out=expected[1:])
        expected += self._plain
        return expected

    def lens(self, num_first: int) -> list[int]:
        """How many tokens of each proposal are among the first. Ties go to earlier tokens, then to earlier proposals."""
        if num_first == len(self._values):
            return self._lens
        flags, ends = _greatest(self._values, num_first)[0].tobytes(), accumulate(self._lens)
        return [flags.count(1, end - num, end) for num, end in zip(self._lens, ends, strict=True)]


@record
class DraftsAtHand:
    """All requests of a target, each with one committed token to compute, none of which awaits a proposal."""

    request_ids: Sequence[str]
    lens: Sequence[int]  # draft tokens that can be verified and committed of each
    survival: Floats  # (requests, at least the longest of ``lens``), as of SequenceView; behind a shorter one -1

    def likeliest(self, num_first: int) -> tuple[Sequence[int], float]:
        """How many tokens of each are among the likeliest, and the survival of the next one; 0: there is none. Ties as of
        `Ranking.lens`."""
        if num_first >= sum(self.lens):
            return self.lens, 0.0
        joined, next_one = _greatest(self.survival, num_first)
        lens: list[int] = np.add.reduce(joined, axis=1).tolist()
        return lens, next_one


def _greatest(values: Floats, num: int) -> tuple[NDArray[np.bool_], float]:
    """Which of more than ``num`` values are the greatest, of equals the first; and the greatest of the others."""
    ordered = np.sort(values, axis=None)
    next_one = float(ordered[-num - 1])
    least = float(ordered[-num]) if num else np.inf
    joined = values >= least
    if least == next_one:
        joined.reshape(-1)[np.flatnonzero(values == least)[num - np.count_nonzero(joined) :]] = False
    return joined, next_one


def throughputs(
    ready: Sequence[SequenceView], context: PassContext, limit_s: float | None, drafting_s: float = 0.0
) -> tuple[Ranking, Floats]:
    """Estimated tokens per second with the n likeliest draft tokens, from n = 0; -1 where pass and ``drafting_s``, the time
    that the drafts took, exceed ``limit_s`` together (AdaSpec, algorithm 3)."""
    ranking = Ranking(ready, context, weighted=False)
    table = context.cost.table(sum([sequence.committed_len for sequence in ready]))
    seconds = drafting_s + table.at_each(np.arange(len(ready), len(ready) + ranking.num_tokens + 1))
    rates: Floats = ranking.expected / seconds
    return ranking, rates if limit_s is None else np.where(seconds <= limit_s, rates, -1.0)
