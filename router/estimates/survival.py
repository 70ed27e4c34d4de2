"""Online calibration: survival of draft prefixes, from the confidences and outcomes of verified drafts."""

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import chain
from math import exp
from struct import pack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from router.cost_model import Floats
from router.estimates.confidence_scaling import OnlineScaling, num_due
from router.estimates.decayed import retained

_EDGES = np.concatenate([[0.0], 1.0 / (1.0 + np.exp(-np.linspace(-4.0, 4.0, 15))), [1.0]])
_NUM_BINS = len(_EDGES) - 1
_STEPS = 250
_GRID = np.linspace(0.0, 1.0, _STEPS + 1)
_EARLY = 200.0  # records that raise the prior log odds of the correction by 1
_LEAST = 1e-3  # least probability of an outcome
_FIRST_AT_ONCE = 16  # records
FEW = 8  # drafts up to which plain Python is faster than numpy


class OnlineSurvival:
    """Calibrates one drafter: how often tokens of a confidence are right at each position, given that those before are.

    - Survival is the product of these rates (Kaplan and Meier's estimator), so partly verified drafts count too.
    - ``OnlineScaling`` corrects slope and offset per position; 16 bins of its output correct the rest. A bin's prior, which
      counts as ``doubt`` verifications, is the estimate of the position before (of the first: the given confidence). Old
      records fade after ``memory`` verifications.
    - Given and corrected confidences are averaged by how well each predicted the outcomes (Bayesian model averaging), with
      a prior that favours the correction as records grow.

    Between bins the calibration is linear and monotone. Positions from ``num_positions`` on share the last.
    """

    def __init__(self, num_positions: int = 8, memory: float = 500.0, doubt: float = 60.0) -> None:
        self._memory = memory
        self._doubt = doubt
        shape = (num_positions, _NUM_BINS)
        self._weight = np.zeros(shape)
        self._scaled = np.zeros(shape)  # sum of scaled confidences
        self._true = np.zeros(shape)  # number of right tokens
        self._scaling = OnlineScaling(num_positions, memory)
        self._corrected = np.tile(_GRID, (num_positions, 1))  # by position and confidence in steps
        self.table = self._corrected.copy()  # the average in use; (num_positions, _STEPS + 1), changed in place
        self._maps: list[list[float]] | None = None  # the table as lists
        self._evidence = 0.0  # log odds of the outcomes: corrected over given confidences
        self._pending: list[tuple[tuple[float, ...], int]] = []
        self.num_records = 0
        self._next_due = self.num_due

    @property
    def num_due(self) -> int:
        """Records that are learned together."""
        return num_due(self.num_records - len(self._pending), _FIRST_AT_ONCE)

    def survival(self, confidences: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        """Probability that each prefix of each draft survives; never rises along a draft."""
        if len(confidences) <= FEW:
            return [self.of_few(row) for row in confidences]
        found = survivals([(self, confidences)]).tolist()
        return [tuple(one[: len(row)]) for one, row in zip(found, confidences, strict=True)]

    def of_few(self, confidences: Sequence[float]) -> tuple[float, ...]:
        """Of one draft."""
        maps = self._maps = self._maps or self.table.tolist()
        survival, found = 1.0, []
        for confidence, at_position in zip(confidences, maps, strict=False):
            survival *= at_position[int(confidence * _STEPS + 0.5)]
            found.append(survival)
        for confidence in confidences[len(maps) :]:
            survival *= maps[-1][int(confidence * _STEPS + 0.5)]
            found.append(survival)
        return tuple(found)

    def record(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Adds a draft: ``confidences`` of its verified tokens, of which the first ``num_accepted`` were right. Records are
        learned in batches, since one changes little."""
        if confidences:
            self.num_records += 1
            self._pending.append((tuple(confidences[: num_accepted + 1]), num_accepted))
            if len(self._pending) >= self._next_due:
                last = len(self._weight) - 1
                tried = [(min(k, last), c, k < num) for row, num in self._pending for k, c in enumerate(row)]
                self._pending.clear()
                self._learn(*(np.array(column) for column in zip(*tried, strict=True)))
                self._next_due = self.num_due

    def record_all(
        self, num_records: int, positions: NDArray[np.intp], confidences: Floats, is_right: NDArray[np.bool_]
    ) -> None:
        """As ``record`` for ``num_records`` drafts: positions, confidences and outcomes of the tried tokens, each [n]."""
        self.num_records += num_records
        self._learn(positions, confidences, is_right)
        self._next_due = self.num_due

    def _learn(self, positions: NDArray[np.intp], confidences: Floats, is_right: NDArray[np.bool_]) -> None:
        """Learns tokens before which all were right."""
        corrected = self._corrected[positions, (confidences * _STEPS).round().astype(np.intp)]
        self._evidence *= exp(-len(confidences) / self._memory)
        self._evidence += _log_likelihood(corrected, is_right) - _log_likelihood(confidences, is_right)
        scaled = self._scaling(confidences, positions)
        bins = np.minimum(np.searchsorted(_EDGES, scaled, side="right") - 1, _NUM_BINS - 1)
        at = positions * _NUM_BINS + bins

        def sums(values: ArrayLike | None = None) -> Floats:
            return np.bincount(at, values, self._weight.size).reshape(self._weight.shape).astype(np.float64)

        num = sums()
        kept = retained(num, self._memory)
        self._weight = self._weight * kept + num
        self._scaled = self._scaled * kept + sums(scaled)
        self._true = self._true * kept + sums(is_right)
        self._scaling.learn(confidences, positions, is_right)
        grids = self._scaling(_GRID, np.arange(len(self._weight))[:, None])
        trust = 1.0 / (1.0 + np.exp(-np.clip(self._evidence + self.num_records / _EARLY, -50.0, 50.0)))
        before = _GRID
        for position, grid in enumerate(grids):
            before = self._fitted(position, before)
            self._corrected[position] = np.interp(grid, _GRID, before)
            self.table[position] = _GRID + trust * (self._corrected[position] - _GRID)
        self._maps = None

    def _fitted(self, position: int, before: Floats) -> Floats:
        """(_STEPS + 1,) calibrated values of the scaled confidences at a position; ``before``: of the position before."""
        weight, scaled = self._weight[position], self._scaled[position]
        middle = (_EDGES[:-1] + _EDGES[1:]) / 2
        xs = np.clip(np.where(weight > 0, scaled / np.maximum(weight, 1e-12), middle), _EDGES[:-1], _EDGES[1:])
        found_before = np.interp(xs, _GRID, before)
        ys = (self._true[position] + self._doubt * found_before) / (weight + self._doubt)
        return np.interp(_GRID, xs, _pooled(ys, weight + 1.0))


class SurvivalRows:
    """Of drafts that were predicted together: an array [drafts, longest], and its rows as lists where they are read."""

    def __init__(self, values: Floats) -> None:
        self.values = values

    @cached_property
    def lists(self) -> list[list[float]]:
        found: list[list[float]] = self.values.tolist()
        return found


def survivals(drafts: Sequence[tuple[OnlineSurvival, Sequence[Sequence[float]]]]) -> Floats:
    """``OnlineSurvival.survival`` of drafts under several calibrations of equal shape, one after the other: a row each, of
    the longest one's length. What stands behind the end of a shorter one means nothing."""
    rows = [row for _, confidences in drafts for row in confidences]
    lens = set(map(len, rows))
    most = max(lens)
    padded = rows if len(lens) == 1 else [(*row, *(0.0,) * (most - len(row))) for row in rows]
    given = np.frombuffer(pack(f"{len(rows) * most}d", *chain.from_iterable(padded))).reshape(len(rows), most)
    at = (given * _STEPS + _offsets(most, len(drafts[0][0].table))).astype(np.intp)
    rates, start = np.empty(at.shape), 0
    for calibration, confidences in drafts:  # few drafters: each step of numpy takes long on the first call of a round
        stop = start + len(confidences)
        calibration.table.take(at[start:stop], out=rates[start:stop], mode="clip")
        start = stop
    return np.multiply.accumulate(rates, axis=1, out=rates)


@cache
def _offsets(num_tokens: int, num_positions: int) -> Floats:
    """In a flat table, of the positions of a draft; and a half, by which steps are rounded."""
    return np.minimum(np.arange(num_tokens), num_positions - 1) * (_STEPS + 1) + 0.5


def _log_likelihood(predicted: Floats, is_right: NDArray[np.bool_]) -> float:
    """Log-likelihood of the outcomes."""
    chances = np.where(is_right, predicted, 1.0 - predicted)
    return float(np.log(np.maximum(chances, _LEAST)).sum())


def _pooled(values: Floats, weights: Floats) -> Floats:
    """Isotonic least-squares regression (pool adjacent violators)."""
    pools: list[list[float]] = []  # value, weight, number of members
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            late = pools.pop()
            early = pools[-1]
            total = early[1] + late[1]
            pools[-1] = [(early[0] * early[1] + late[0] * late[1]) / total, total, early[2] + late[2]]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])
