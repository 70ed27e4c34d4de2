"""Matching under capacity: as good as the general algorithm on replicated drafters, from any prices."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from router.drafter.matching import NOWHERE, Floats, Ints, match


def best_sum(values: Floats, capacity: Ints) -> float:
    """Problem (10)-(12) of SPIN as the paper solves it: every drafter replicated, nobody forced."""
    replicated = np.repeat(np.maximum(values, 0.0), capacity, axis=1)
    rows, columns = linear_sum_assignment(replicated, maximize=True)
    return float(replicated[rows, columns].sum())


def sum_of(values: Floats, place: Ints) -> float:
    seated = np.flatnonzero(place != NOWHERE)
    return float(values[seated, place[seated]].sum())


def random_values(random: np.random.Generator, num_requests: int, num_drafters: int) -> Floats:
    """Of several kinds: smooth, with many ties, the same order for everybody, and some below 0."""
    values: Floats = random.gamma(4.0, 0.5, (num_requests, num_drafters))
    match random.integers(4):
        case 1:
            return np.round(values)
        case 2:
            return values[:, :1] * np.linspace(1.0, 1.5, num_drafters)
        case 3:
            return values - 2.0
    return values


@pytest.mark.parametrize("seed", range(200))
def test_no_other_places_give_more(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random_values(random, int(random.integers(0, 30)), int(random.integers(1, 6)))
    capacity = random.integers(0, 8, values.shape[1])
    for prices in (None, random.gamma(1.0, 1.0, values.shape[1])):
        found = match(values, capacity, prices)
        counts = np.bincount(found.place[found.place != NOWHERE], minlength=len(capacity))
        assert (counts <= capacity).all()
        assert sum_of(values, found.place) == pytest.approx(best_sum(values, capacity), abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_prices_support_the_places(seed: int) -> None:
    """At the prices that are found, everybody is where it gains most: so they tell what one place more would bring."""
    random = np.random.default_rng(seed)
    values, capacity = random.gamma(4.0, 0.5, (60, 4)), np.array([5, 10, 0, 20])
    found = match(values, capacity)
    net = np.where(capacity > 0, values - found.prices, -np.inf)
    mine = np.where(found.place == NOWHERE, 0.0, net[np.arange(60), found.place])
    assert (mine >= np.maximum(net.max(axis=1), 0.0) - 1e-6).all()


def test_known_prices_leave_little_to_improve() -> None:
    random = np.random.default_rng(1)
    values, capacity = random.gamma(4.0, 0.5, (400, 1)) * np.linspace(1.0, 1.5, 8), np.full(8, 20)
    known = match(values, capacity).prices
    later = values + random.normal(0.0, 0.002, values.shape)
    best = best_sum(later, capacity)

    def num_cycles(prices: Floats | None) -> int:
        """Enough to come as near as makes no difference, in powers of two."""
        enough = (
            n for n in (2**i for i in range(12)) if sum_of(later, match(later, capacity, prices, n).place) > 0.9999 * best
        )
        return next(enough)

    assert num_cycles(known) <= num_cycles(None) / 4


@pytest.mark.parametrize("max_cycles", [0, 1, 3])
def test_a_matching_that_is_cut_short_is_still_one(max_cycles: int) -> None:
    random = np.random.default_rng(2)
    values, capacity = np.round(random.gamma(4.0, 0.5, (100, 5))) + 1.0, np.full(5, 7)
    found = match(values, capacity, None, max_cycles)
    assert (np.bincount(found.place[found.place != NOWHERE], minlength=5) == capacity).all()
    assert sum_of(values, found.place) >= 0.8 * best_sum(values, capacity)


def test_nobody_is_sent_where_it_loses() -> None:
    found = match(np.array([[-1.0, 0.0], [2.0, -1.0]]), np.array([2, 2]))
    assert found.place.tolist() == [NOWHERE, 0]
    assert match(np.zeros((0, 3)), np.ones(3, np.int64)).place.tolist() == []
    assert match(np.zeros((2, 0)), np.zeros(0, np.int64)).place.tolist() == [NOWHERE, NOWHERE]
