"""Exponential forgetting, and the pauses between trials."""

from math import exp

import pytest

from router.estimates.decayed import DecayedMean, DecayedSums
from router.estimates.trial import Exploration


def test_sums_fade_with_the_samples_of_their_own_key() -> None:
    sums: DecayedSums[str] = DecayedSums(memory=10.0)
    sums.add("a", (4.0, 2.0), 4)
    sums.add("b", (1.0,), 1)
    sums.add("a", (10.0, 1.0, 7.0), 10)
    assert sums.get("a", 3) == pytest.approx((10.0 + 4.0 * exp(-1), 1.0 + 2.0 * exp(-1), 7.0))
    assert sums.get("b", 1) == (1.0,)
    assert sums.get("c", 2) == (0.0, 0.0)
    sums.fade(10.0, least=0.5)
    assert set(sums.sums) == {"a"}
    assert sums.snapshot() == {"a": pytest.approx([10 * exp(-1) + 4 * exp(-2), exp(-1) + 2 * exp(-2), 7 * exp(-1)])}


def test_a_mean_is_of_all_samples_first_and_of_the_newest_then() -> None:
    mean = DecayedMean(8.0)
    for sample in (1.0, 2.0, 3.0):
        mean.add(sample)
    assert mean.value == pytest.approx(2.0)
    assert mean.clipped(100.0) == 100.0, "what is usual is not known yet"
    for _ in range(200):
        mean.add(5.0)
    assert mean.value == pytest.approx(5.0)
    assert mean.clipped(100.0) == pytest.approx(15.0)


def test_samples_that_are_added_together_count_as_many() -> None:
    one_by_one, together = DecayedMean(8.0), DecayedMean(8.0)
    for sample in (1.0, 1.0, 0.0, 1.0, 0.0):
        one_by_one.add(sample)
    together.add_all(2.0, 3)
    together.add_all(1.0, 2)
    assert together == one_by_one
    assert together.shrunk(0.0, 1.0) == pytest.approx(3.0 / 6.0)
    for _ in range(50):
        together.add_all(4.0, 4)
    assert (together.num, together.value) == (8.0, pytest.approx(1.0))


def test_pauses_double_with_each_trial_in_vain() -> None:
    pause = Exploration(shortest=2, longest=6)
    trials = [number for number in range(1, 22) if pause.tries()]
    assert trials == [2, 6, 12, 18]
    pause.reset()
    assert [pause.tries() for _ in range(3)] == [False, True, False]
