"""Drafting ahead of several outcomes of a verification (Saguaro, speculative speculative decoding, arXiv 2603.03251).

An outcome (j, c) of a draft of K tokens: the first j are accepted, then the target chooses c. With S_j the calibrated
survival of the first j tokens, and h_r the rate at which the target chose a drafter's r-th other choice where it rejected
the first:

    P(j, c_r) = (S_j - S_(j+1)) h_r        position K is that of the bonus token

A drafter with the target's noise knows these choices: they are its next best perturbed logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.estimates.decayed import LASTING, DecayedMean

NUM_RUNNERS_UP = 2  # considered at each position
_LEAST = 0.01  # probability of an outcome that is considered
_PRIOR_RATES = (0.4, 0.15)  # h_1, h_2
_NUM_PRIOR = 8.0  # rejections that they count as


@dataclass(frozen=True, slots=True)
class Outcome:
    num_accepted: int
    token_id: int
    probability: float


class RunnerUpRates:
    """h_r, learned from the commits that follow drafts."""

    def __init__(self) -> None:
        self._means = [DecayedMean(LASTING) for _ in range(NUM_RUNNERS_UP)]

    def note(self, runners_up: Sequence[int], token_id: int) -> None:
        """The target chose ``token_id`` instead of a draft token that had these runners-up."""
        for mean, other in zip(self._means, runners_up, strict=False):
            mean.add(float(other == token_id))

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple([mean.shrunk(prior, _NUM_PRIOR) for mean, prior in zip(self._means, _PRIOR_RATES, strict=True)])


def outcomes(
    survival: Sequence[float], runners_up: Sequence[Sequence[int]], rates: Sequence[float], first: int = 0
) -> list[Outcome]:
    """Outcomes in which the target rejects one of the tokens from ``first`` on.

    Args:
        survival: calibrated, of each prefix of the draft and the drafter's own guess of the bonus token.
        runners_up: at each of these tokens.
    """
    found, before = [], 1.0 if not first else survival[first - 1]
    for j in range(first, min(len(survival), len(runners_up))):
        rejected, before = max(0.0, before - survival[j]), survival[j]
        for token_id, rate in zip(runners_up[j], rates, strict=False):
            if rejected * rate >= _LEAST:
                found.append(Outcome(j, token_id, rejected * rate))
    return found


def num_prepared(
    own: float,
    others: Sequence[float],
    num_rows: int,
    num_requests: int,
    num_steps: int,
    spare_s: float,
    step_s: Callable[[int], float],
) -> int | None:
    """How many of the likeliest outcomes to prepare beside what is prepared; None: draft nothing ahead.

    With n more, a step takes t(n) seconds, and m = min(num_steps, spare_s / t(n)), at least 1, are made before the commit.
    An outcome that comes true saves its request the time of m steps of a draft. A commit that comes during a step waits for
    half of one on average, with all requests, unless everything was drafted before. The best n has the greatest

        t_draft m sum P  -  num_requests t(n) / 2  [m < num_steps]

    Args:
        own: sum of the probabilities of what is prepared, the drafter's own guesses among them.
        others: probabilities of the other outcomes, descending.
        num_rows: of a step over what is prepared.
        num_requests: whose drafts are verified.
        num_steps: that are missing of the longest draft that is prepared.
        spare_s: until the commit is expected.
        step_s: time of a draft step by rows; 0: not known.
    """
    draft_step_s = step_s(num_requests)
    if draft_step_s <= 0.0:
        return None
    best, best_gain, total = None, 0.0, own
    for num in range(len(others) + 1):
        if num:
            total += others[num - 1]
        if not num_rows + num:
            continue
        seconds = step_s(num_rows + num)
        steps = max(1, min(num_steps, int(spare_s / seconds)))
        gain = draft_step_s * steps * total
        if steps < num_steps:
            gain -= 0.5 * num_requests * seconds
        if gain > best_gain:
            best, best_gain = num, gain
    return best
