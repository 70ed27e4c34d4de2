"""Acceptance over all requests and of each: shrinkage and forgetting."""

import pytest

from router.assignment import PoolMember, Positions, ScoreCounts
from router.estimates.acceptance import AcceptanceModel
from router.estimates.decayed import GENERATION_SLOTS

DRAFT_LEN = 4


def learn(known: AcceptanceModel, drafter: str, right: float, num: int, request: str = "gone") -> None:
    """``num`` drafts of which each token is right at rate ``right``."""
    reached = tuple(round(num * right**i) for i in range(DRAFT_LEN))
    positions = Positions(reached, tuple(round(num * right ** (i + 1)) for i in range(DRAFT_LEN)))
    known.observe([], [ScoreCounts(request, drafter, positions)])


def member(drafter: str) -> PoolMember:
    return PoolMember(drafter, 8, 0.1, max_draft_len=DRAFT_LEN)


def rate(known: AcceptanceModel, drafter: str) -> float:
    """At the first position."""
    return known.mean_rates(member(drafter))[0]


def test_positions_count_what_was_reached_and_what_was_right() -> None:
    positions = Positions().plus(2, failed=True).plus(0, failed=True).plus(1, failed=False)
    assert positions == Positions((3, 1, 1), (2, 1, 0))


def test_a_drafter_that_nobody_tried_is_like_the_others() -> None:
    known = AcceptanceModel()
    learn(known, "a", 0.8, 1000)
    learn(known, "b", 0.4, 1000)
    assert rate(known, "a") == pytest.approx(0.8, abs=0.01)
    assert rate(known, "c") == pytest.approx(0.6, abs=0.01)


def test_what_is_old_fades() -> None:
    known = AcceptanceModel()
    for _ in range(50):
        learn(known, "a", 0.9, 200)
    for _ in range(20):
        learn(known, "a", 0.1, 200)
    assert rate(known, "a") < 0.15


def test_a_request_moves_from_the_drafters_mean_to_its_own() -> None:
    known = AcceptanceModel()
    known.next_slot(["r"])
    learn(known, "a", 0.3, 4000)
    lens = []
    for num in (0, 8, 200):
        learn(known, "a", 0.9, num, "r")
        (own,), (num_rounds,) = known.expected_lens(["r"], [member("a")])
        lens.append((own.item(), num_rounds.item()))
    assert lens[0][0] == pytest.approx(1.0 + 0.3 + 0.3**2 + 0.3**3 + 0.3**4, abs=0.05)
    assert lens == sorted(lens)
    assert lens[-1][0] > 0.85 * (1.0 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4)


def test_of_requests_that_ended_nothing_is_kept_for_long() -> None:
    known = AcceptanceModel()
    known.next_slot(["r"])
    learn(known, "a", 0.9, 500, "r")
    for _ in range(3 * GENERATION_SLOTS):
        known.next_slot([])
    learn(known, "a", 0.1, 20_000)
    assert known.expected_lens(["r"], [member("a")])[0].item() < 1.2
