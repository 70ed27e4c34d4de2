"""Acceptance over all requests: shrinkage and forgetting."""

import numpy as np
import pytest

from router.assignment import Positions
from router.estimates.pool_acceptance import NUM_POSITIONS, PoolAcceptance, counts_of


def learn(known: PoolAcceptance, drafter: str, positions: Positions) -> None:
    known.add(np.array([known.row(drafter)]), *counts_of([positions]))


def rate(known: PoolAcceptance, drafter: str) -> float:
    """At the first position."""
    row = known.row(drafter)
    return float(known.means()[row, 0])


def drafts(right: float, num: int) -> Positions:
    """``num`` drafts of any length, of which each token is right at rate ``right``."""
    at = np.arange(NUM_POSITIONS)
    return Positions(tuple(round(num * right**i) for i in at), tuple(round(num * right ** (i + 1)) for i in at))


def test_positions_count_what_was_reached_and_what_was_right() -> None:
    positions = Positions().plus(2, failed=True).plus(0, failed=True).plus(1, failed=False)
    assert positions == Positions((3, 1, 1), (2, 1, 0))


def test_a_drafter_that_nobody_tried_is_like_the_others() -> None:
    known = PoolAcceptance(1e6)
    learn(known, "a", drafts(0.8, 1000))
    learn(known, "b", drafts(0.4, 1000))
    assert rate(known, "a") == pytest.approx(0.8, abs=0.01)
    assert rate(known, "c") == pytest.approx(0.6, abs=0.01)


def test_what_is_old_fades() -> None:
    known = PoolAcceptance(100.0)
    for _ in range(50):
        learn(known, "a", drafts(0.9, 20))
    for _ in range(20):
        learn(known, "a", drafts(0.1, 20))
    assert rate(known, "a") < 0.15
