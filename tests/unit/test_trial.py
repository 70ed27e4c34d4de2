"""Whether an option pays, as measured."""

import random
from math import exp

import pytest

from router.estimates.decayed import DecayedMean, DecayedSums
from router.estimates.trial import Exploration, Trial


def run_trial(with_s: float, without_s: float, num_passes: int, noise: float = 0.0) -> list[bool | None]:
    """What a trial decides for spells that take so long per token."""
    trial, draw, found = Trial(128, 16_384), random.Random(1), []
    for _ in range(num_passes):
        is_used = trial.next()
        found.append(is_used)
        if is_used is not None:
            trial.note(is_used, (with_s if is_used else without_s) * draw.gauss(1.0, noise))
    return found


def test_an_option_that_loses_is_off_soon_and_tried_ever_more_rarely() -> None:
    found = run_trial(1.05, 1.0, 20_000)
    assert found[:16].count(True) == found[:16].count(False) == 8
    assert found[16:144] == [None] * 128
    assert found.count(True) < 0.005 * len(found)


def test_spells_that_a_coarse_clock_gives_no_time_say_nothing() -> None:
    trial, other = Trial(128, 16_384), Trial(128, 16_384)
    for i in range(200):
        for one in (trial, other):
            is_used = one.next()
            if one is trial:
                one.note(bool(is_used), 0.0)
            one.note(bool(is_used), 0.9 if is_used else 1.0 + i % 2 / 100)
    assert [trial.next() for _ in range(50)] == [other.next() for _ in range(50)]


def test_one_that_saves_time_stays_on_and_is_compared() -> None:
    found = run_trial(0.9, 1.0, 2_000, noise=0.02)
    assert None not in found
    assert found[200:].count(False) / len(found[200:]) == pytest.approx(1 / 32, abs=0.01)


def test_a_saving_that_is_in_doubt_is_compared_more_often() -> None:
    shares = []
    for noise in (0.02, 0.15):
        found = run_trial(0.95, 1.0, 4_000, noise)
        assert None not in found
        shares.append(found[200:].count(False) / len(found[200:]))
    assert shares[1] > 2 * shares[0]


def test_a_saving_is_kept_where_spells_are_noisy() -> None:
    """A spell is compared with the mean of seven, whose log is larger than the mean of their logs."""
    shares = []
    for seed in range(40):
        trial, draw, num_used = Trial(32, 1024), random.Random(seed), 0
        for _ in range(4_000):
            is_used = trial.next()
            num_used += is_used is True
            if is_used is not None:
                trial.note(is_used, (0.9 if is_used else 1.0) * draw.gammavariate(6.25, 1 / 6.25))
        shares.append(num_used / 4_000)
    assert sum(shares) / len(shares) > 0.8


def test_something_else_that_runs_now_and_then_hides_no_saving() -> None:
    """15% of the spells take 1.3 to 2.5 times as long, on both sides."""

    def used(saved: float) -> float:
        num_used = 0
        for seed in range(30):
            trial, draw = Trial(128, 16_384), random.Random(seed)
            for _ in range(2_000):
                is_used = trial.next()
                num_used += is_used is True
                if is_used is not None:
                    slow = draw.uniform(1.3, 2.5) if draw.random() < 0.15 else 1.0
                    trial.note(is_used, slow * (1.0 - saved * is_used) * draw.gauss(1.0, 0.1))
        return num_used / (30 * 2_000)

    assert used(0.05) > 0.7
    assert used(-0.05) < 0.1


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_a_saving_within_the_noise_is_none(noise: float) -> None:
    found = run_trial(1.0, 1.0, 4_000, noise)
    assert found.count(True) < 0.06 * len(found)


@pytest.mark.parametrize(("saved", "pays"), [(0.1, True), (0.0, False)])
def test_a_machine_whose_speed_drifts_decides_nothing(saved: float, pays: bool) -> None:
    """Spells compare with those beside them: half of the time all of them take one and a half times as long."""
    for period in (25, 60, 200, 450):
        trial, draw, num_used = Trial(512, 16_384), random.Random(period), 0
        for i in range(4_000):
            is_used = trial.next()
            num_used += is_used is True
            if is_used is not None:
                slow = 1.5 if i // period % 2 else 1.0
                trial.note(is_used, slow * (1.0 - saved * is_used) * draw.gauss(1.0, 0.05))
        assert (num_used > 3_000) == pays
        assert pays or num_used < 200


def test_one_that_stops_paying_is_off() -> None:
    trial = Trial(512, 16_384)
    seen = []
    for i in range(2_000):
        is_used = trial.next()
        seen.append(is_used)
        if is_used is not None:
            trial.note(is_used, (0.9 if i < 400 else 1.1) if is_used else 1.0)
    assert None not in seen[:400]
    first_worse = seen.index(False, 400)
    assert first_worse < 433
    assert seen[first_worse + 1 :].index(False) == 7, "it is in doubt at once"
    assert seen[640:].count(True) < 80


# ---- exponential forgetting, and the pauses between trials


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
