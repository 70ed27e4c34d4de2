"""Draft times by batch, and reply times, as a target learns them of its drafters."""

import pytest

from router.estimates.draft_times import DraftTimes
from router.estimates.drafter_stats import DrafterStats


def test_what_one_request_more_takes_is_remembered_once_batches_are_alike() -> None:
    times = DraftTimes()
    for _ in range(20):
        times.add(4, 0.070)
        times.add(8, 0.074)
    for _ in range(1000):
        times.add(8, 0.074)
    assert times.at(8) == pytest.approx(0.074, rel=0.01)
    assert times.at(4) == pytest.approx(0.070, rel=0.05)


def test_a_first_time_of_nothing_hides_no_later_one() -> None:
    times = DraftTimes()
    times.add(8, 0.0)
    for _ in range(50):
        times.add(8, 0.08)
    assert times.at(8) > 0.07


def test_batches_that_are_alike_are_proportional() -> None:
    times = DraftTimes()
    for _ in range(50):
        times.add(8, 0.08)
    assert times.at(4) == pytest.approx(0.04)
    assert times.at(16) == pytest.approx(0.16)


def test_batches_that_are_alike_take_a_share_more_for_a_request_more_if_that_is_thought() -> None:
    times = DraftTimes(0.25)
    for _ in range(50):
        times.add(2, 0.008)
    assert times.at(16) == pytest.approx(0.008 + 14 * 0.25 * 0.004)
    for _ in range(50):
        times.add(16, 0.05)
    assert times.at(9) == pytest.approx(0.029, rel=0.02)


def test_a_wait_for_other_drafts_is_no_part_of_the_transit() -> None:
    """Where one half of a batch is drafted for while the other is verified, each waits for the other's drafts."""
    stats = DrafterStats()
    for reply_s in (0.072, 0.074, *[0.096] * 200):
        stats.drafted(4, 0.070, [8, 8, 8, 8])
        stats.replied(reply_s)
    assert stats.view.reply_s == pytest.approx(0.096, abs=0.001)
    assert stats.view.overhead_s < 0.007
    stats.restarted()
    stats.drafted(4, 0.070, [8])
    stats.replied(0.080)
    assert stats.view.overhead_s == pytest.approx(0.010)
