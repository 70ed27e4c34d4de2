"""Predicted time per token of chains of models, and the fastest chain that a pool allows (SpecRouter).

In a chain [M_1, ..., M_n, target] (`drafters.model`), M_j's draft is what M_j alone would draft. M_{j-1} proposes up to
w_{j-1} tokens of it; one pass of M_j verifies those and adds one token. So the models below M_n change the cost of a draft,
never its tokens:

    T_eff = (C_n(w_n) + T_target(B (f_n w_n + 1))) / (1 + sum over k <= w_n of S_k)     seconds per token of a request

    C_1(m) = m T_1                      m steps of the smallest model
    C_j(m) = sum over its passes of C_{j-1}(min(w_{j-1}, left - 1)) + T_j(rows), left falling by accepted + 1 with each

S_k: probability that the first k tokens of M_n's draft are the target's. T_j(rows): a pass of M_j over one row per
unfinished request of the batch B plus one per proposed token. f_j: share of M_j's requested tokens that get rows above it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations
from operator import mul

from router.assignment import NO_POSITIONS, TARGET_ONLY, Chain
from router.cost_model import ROWS, CostModel, TableCost, monotone
from router.estimates.acceptance import PositionCounts
from router.estimates.decayed import USUAL, DecayedMean, DecayedSums

MAX_LEVELS = 4  # of models in a chain, the target included
PROPOSAL_LEN, MAX_WINDOW = 4, 8  # tokens that a level requests from the one below at a time: at first, and at most
LEARN_PERIOD = 4  # passes from one choice of a window to the next


def pass_times(cost: CostModel, num_context: int = 0) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) of a target's passes with ``num_context`` tokens of context."""
    return tuple((rows, cost.step_s(rows, num_context)) for rows in ROWS)


@dataclass(frozen=True)
class Level:
    """A drafter in a chain."""

    drafter: str
    passes: TableCost
    window: int  # tokens that the level above requests
    # By position: probability that the token is right for the level above, given those before it; the last value holds on.
    acceptance: tuple[float, ...]
    fill: float = 1.0  # share of the window that the level above verifies: lookups are often silent

    def __post_init__(self) -> None:
        shares = (self.fill, *self.acceptance)
        if self.window < 1 or not self.acceptance or not all(0.0 <= share <= 1.0 for share in shares):
            raise ValueError(f"{self.drafter}: invalid window {self.window}, acceptance or fill {shares}")

    def at(self, position: int) -> float:
        return self.acceptance[min(position, len(self.acceptance) - 1)]

    @cached_property
    def survival(self) -> tuple[float, ...]:
        """Probability that the first k tokens of its draft are right, for k from 0 to its window."""
        return tuple(accumulate(map(self.at, range(self.window)), mul, initial=1.0))

    def num_right(self, num_tokens: int) -> list[float]:
        """Distribution of the number of accepted tokens of ``num_tokens``."""
        survival = self.survival
        return [survival[k] - (survival[k + 1] if k < num_tokens else 0.0) for k in range(num_tokens + 1)]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One round of a batch."""

    round_s: float
    num_tokens: float  # of a request and round, the bonus token included

    @property
    def per_token_s(self) -> float:
        return self.round_s / self.num_tokens


def predict(levels: Sequence[Level], target: TableCost, batch: int = 1) -> Prediction:
    """Expected time of a round of a chain, smallest model first, for a batch of independent requests. Exact if pass times
    are affine in rows, accepted lengths follow the levels, and every level drafts all that is requested."""
    if not levels:
        return Prediction(target.at(batch), 1.0)
    last = levels[-1]
    drafting_s = _draft_s(levels, [0.0] * last.window + [1.0], batch)
    return Prediction(drafting_s + target.at(batch * (last.window * last.fill + 1.0)), sum(last.survival))


def _draft_s(levels: Sequence[Level], lens: list[float], batch: int) -> float:
    """Seconds of a batch of drafts by the last of ``levels``, whose lengths have the distribution ``lens``."""
    level, total_s = levels[-1], 0.0
    if len(levels) == 1:
        for step in range(1, len(lens)):
            any_left, num_left = _left(sum(lens[step:]), batch)
            total_s += any_left * level.passes.at(num_left)
        return total_s
    below, left = levels[-2], list(lens)
    while (alive := sum(left[1:])) > 1e-9:
        any_left, num_left = _left(alive, batch)
        asked = [0.0] * (below.window + 1)
        for missing, share in enumerate(left):
            asked[min(below.window, max(0, missing - 1))] += share
        if sum(asked[1:]) > 0.0:
            total_s += _draft_s(levels[:-1], asked, batch)
        rows = num_left * (1.0 + below.fill * sum(m * share for m, share in enumerate(asked)) / alive)
        total_s += any_left * level.passes.at(rows)
        left = _after(left, below)
    return total_s


def _left(alive: float, batch: int) -> tuple[float, float]:
    """Probability that a batch has unfinished requests, each with probability ``alive``, and their expected number."""
    if alive <= 0.0:
        return 0.0, 0.0
    any_left = 1.0 - (1.0 - min(1.0, alive)) ** batch
    return any_left, batch * alive / any_left


def _after(left: list[float], below: Level) -> list[float]:
    """Distribution of the missing tokens after one pass, which adds the accepted tokens and one more."""
    after = [left[0]] + [0.0] * (len(left) - 1)
    for missing in range(1, len(left)):
        if left[missing] > 0.0:
            for num_right, chance in enumerate(below.num_right(min(below.window, missing - 1))):
                after[missing - num_right - 1] += left[missing] * chance
    return after


def best_window(levels: Sequence[Level], verifier: TableCost, batch: int) -> Level:
    """The last of ``levels`` with the W of least T_eff below ``verifier``, as if that were the target: models below another
    change the cost of its drafts alone, so each W can be chosen by itself."""
    *below, last = levels
    tried = [replace(last, window=window) for window in range(1, MAX_WINDOW + 1)]
    return min(tried, key=lambda level: predict([*below, level], verifier, batch).per_token_s)


class LearnedWindow:
    """W of a level, from its passes: how far their drafts were right, and their seconds, affine in tokens requested."""

    def __init__(self) -> None:
        self.window = PROPOSAL_LEN
        self._right: PositionCounts[str] = PositionCounts(USUAL)
        self._pass_s: DecayedSums[str] = DecayedSums(USUAL)  # number; tokens, squares; seconds, times tokens
        self._step_s, self._num_new = DecayedMean(), 0

    def learn(self, drafts: Iterable[tuple[int, int]], step_s: float, pass_s: float) -> None:
        """Of a pass: for each draft how many tokens were requested, and how many were right; ``step_s`` of one of them
        (outliers are clipped); ``pass_s`` that verified them."""
        self._step_s.add(self._step_s.clipped(step_s))
        for num_asked, num_right in drafts:
            seen = NO_POSITIONS.plus(num_right, num_right < num_asked)
            self._right.add("", seen.num_reached, seen.num_right)
            self._pass_s.add("", (1.0, num_asked, num_asked**2, pass_s, num_asked * pass_s), 1.0)
        self._num_new = (self._num_new + 1) % LEARN_PERIOD
        if self._num_new:
            return
        num, asked, squares, seconds, products = self._pass_s.get("", 5)
        spread = num * squares - asked**2
        token_s = max(0.0, (num * products - asked * seconds) / spread) if spread > 1e-3 else 0.0
        first_s = max(0.0, seconds - token_s * asked) / num
        below = Level("", TableCost((1,), (self._step_s.value,)), 1, self._right.rates("", (0.5,), 1.0))
        self.window = best_window([below], monotone(((1, first_s), (2, first_s + token_s))), 1).window


def candidates(drafters: Sequence[str], verifiers: Iterable[str], max_levels: int = MAX_LEVELS) -> list[Chain]:
    """Every chain of up to ``max_levels`` models, target included, shortest first; drafters keep this order. All but the
    first drafter of a chain must be among ``verifiers``."""
    can_verify = frozenset(verifiers)
    return [
        chain
        for num_drafters in range(max_levels)
        for chain in combinations(drafters, num_drafters)
        if can_verify.issuperset(chain[1:])
    ]


def fastest(predictions: Sequence[tuple[Chain, float]], current: Chain | None = None, hysteresis: float = 0.0) -> Chain:
    """The chain with the least seconds per token; the target alone without predictions. ``current`` is left only for a
    chain that is faster by the share ``hysteresis``."""
    best, best_s = min(predictions, key=lambda found: found[1], default=(TARGET_ONLY, 0.0))
    for chain, per_token_s in predictions:
        if chain == current and best_s >= per_token_s * (1.0 - hysteresis):
            return chain
    return best
