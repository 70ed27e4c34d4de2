"""Marginal gain of querying an expensive drafter, learned from outcomes."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from router.estimates.decayed import LASTING, DecayedMean
from router.estimates.trial import Exploration

_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6)  # boundaries of the tokens expected without it
_PRIOR_GAIN = 1.0  # tokens, of a drafter of which nothing is known there
_PRIOR_TRIALS = 3.0  # trials that this counts for
# Few trials: until there are so many it is queried for a share of a batch, in some rounds. All requests wait for its drafts,
# and a gate that sees what all drafters cost together (`colocated_gate.py`) would count trials as their usual cost.
_TRIED_SHARE, _TRIED_EVERY = 1 / 8, 4
_STALE_TRIALS = 12.0  # trials that what was found before a pause counts for after it


class MarginalGain:
    """Of one drafter: accepted tokens that querying it added to the best draft without it."""

    def __init__(self) -> None:
        self._gains = [DecayedMean(LASTING) for _ in range(len(_EDGES) + 1)]
        self._explorations = [Exploration() for _ in self._gains]
        self._num_unknown_rounds = 0  # that would query it where little is known

    def choose(
        self,
        expected_lens: Sequence[float],
        price: Callable[[int], float],
        num_timed: int | None = None,
        is_learned: Sequence[bool] | None = None,
    ) -> list[int]:
        """Requests of a round to query it for, ascending; chosen together, since all wait for it. After enough rounds
        without it, one request explores at any price.

        Args:
            expected_lens: tokens without it, by request.
            price: tokens that the batch would decode while it drafts for so many.
            num_timed: requests of the largest batch whose drafts were timed. Given that, it is queried for twice as many at
                most, and for few, in every fourth round, where it is not known what it gains. None: for all at once.
            is_learned: whether ``learn`` follows, by request; None: of all. Others are no trials.
        """
        places = [bisect_right(_EDGES, expected_len) for expected_len in expected_lens]
        learned = is_learned or [True] * len(places)
        first = {places[i]: i for i in reversed(range(len(places))) if learned[i]}
        expected = {at: self._expected(at) for at in set(places)}
        loss = price(1) / len(places)  # in rounds, in which each request decodes a token
        due = {at for at in first if self._explorations[at].tries(loss - expected[at] / len(places))}
        tried = [first[at] for at in due]
        gains = [expected[at] for at in places]
        others = sorted((i for i in range(len(places)) if i not in tried), key=lambda i: -gains[i])
        best = _best(others, gains, len(tried), price)
        if num_timed is not None and len(places) > 1:
            is_unknown = [self._gains[at].num < _PRIOR_TRIALS for at in places]
            wanted = [i for i in best if is_unknown[i]]
            if wanted:
                trials = self._trials([i for i in wanted if learned[i]], len(places))
                known = [i for i in others if not is_unknown[i]]
                best = [*trials, *_best(known, gains, len(tried) + len(trials), price)]
            best = best[: max(1, 2 * num_timed)]
        paying = {places[i] for i in best}
        for at in paying:
            self._explorations[at].reset()
        for at in due - paying:
            self._gains[at].fade(_STALE_TRIALS)
        return sorted((*tried, *best))

    def _trials(self, wanted: Sequence[int], batch: int) -> Sequence[int]:
        """Few of those for whom it is unknown what the drafter gains; in most rounds none."""
        if not wanted:
            return ()
        self._num_unknown_rounds += 1
        return wanted[: max(1, int(_TRIED_SHARE * batch))] if self._num_unknown_rounds % _TRIED_EVERY == 1 else ()

    def learn(self, gain: float, expected_len: float) -> None:
        """Adds a query in which ``gain`` more tokens were accepted than without it."""
        at = bisect_right(_EDGES, expected_len)
        if gain > self._expected(at):
            self._explorations[at].reset()
        self._gains[at].add(gain)

    def _expected(self, at: int) -> float:
        """Expected gain; optimistic while little is known."""
        return self._gains[at].shrunk(_PRIOR_GAIN, _PRIOR_TRIALS)


def _best(candidates: Sequence[int], gains: Sequence[float], num_others: int, price: Callable[[int], float]) -> list[int]:
    """Of ``candidates``, by descending gain, as many as gain most beside ``num_others`` that it is queried for anyway."""
    surplus, most, num_best = 0.0, 0.0, 0
    free = price(num_others) if num_others else 0.0
    for num, i in enumerate(candidates, 1):
        surplus += gains[i]
        net = surplus - (price(num_others + num) - free)
        if net > most:
            most, num_best = net, num
    return list(candidates[:num_best])
