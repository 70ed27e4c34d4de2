"""Timing in turn: a bad minute meets everybody, and what is in doubt is timed again."""

import itertools
from collections.abc import Callable

import pytest

from profiler.interleaved import MAX_VISITS, OwnTime, Timing, TimingBudget, time_interleaved


class Machine:
    """A clock, and works that take the time that they are said to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def work(self, name: str, *times_s: float) -> Callable[[], float]:
        cycle = itertools.cycle(times_s)

        def once() -> float:
            self.order.append(name)
            taken_s = next(cycle)
            self.now_s += taken_s
            return taken_s

        return once


def test_the_median_and_its_spread() -> None:
    timing = Timing.of([1.0, 1.0, 2.0, 1.0, 9.0])
    assert timing == Timing(1.0, 1.0, 5)
    assert Timing.of([3.0]) == Timing(3.0, 0.0, 1)


def test_sweeps_visit_everything_in_turn() -> None:
    machine = Machine()
    works = {name: machine.work(name, 0.1) for name in "abcd"}
    found = time_interleaved(works, TimingBudget(min_visits=3, budget_s=100.0), lambda: machine.now_s)
    assert len(machine.order) == 4 * (1 + 3)  # the first sweep warms up
    for sweep in range(4):
        assert sorted(machine.order[4 * sweep : 4 * sweep + 4]) == ["a", "b", "c", "d"]
    assert {name: (t.seconds, t.num) for name, t in found.items()} == {name: (pytest.approx(0.1), 3) for name in "abcd"}


def test_a_bad_minute_does_not_look_like_a_slow_thing() -> None:
    machine = Machine()

    def half_of_the_time_twice_as_slow() -> float:
        taken_s = 0.1 if machine.now_s % 20 < 12 else 0.2
        machine.now_s += taken_s
        return taken_s

    works = dict.fromkeys(range(30), half_of_the_time_twice_as_slow)
    found = time_interleaved(works, TimingBudget(9, 0.0), lambda: machine.now_s)
    assert sum(timing.seconds == pytest.approx(0.1) for timing in found.values()) >= 25


def test_what_is_in_doubt_is_timed_again_within_the_budget() -> None:
    machine = Machine()
    works = {"steady": machine.work("steady", 0.1), "noisy": machine.work("noisy", 0.1, 0.2)}
    found = time_interleaved(works, TimingBudget(3, 1000.0, precision=0.02), lambda: machine.now_s)
    assert found["steady"].num == 3
    assert found["noisy"].num == MAX_VISITS
    machine = Machine()
    works = {"noisy": machine.work("noisy", 0.1, 0.2)}
    assert time_interleaved(works, TimingBudget(3, 1.0, precision=0.02), lambda: machine.now_s)["noisy"].num < 10


def test_the_least_is_done_whatever_the_budget() -> None:
    machine = Machine()
    shares: list[float] = []
    found = time_interleaved({"a": machine.work("a", 5.0)}, TimingBudget(4, 1.0), lambda: machine.now_s, shares.append)
    assert found["a"].num == 4
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_what_is_quick_is_timed_several_times_at_a_visit() -> None:
    machine = Machine()
    found = time_interleaved({"quick": machine.work("quick", 1e-5)}, TimingBudget(2, 0.0), lambda: machine.now_s)
    assert found["quick"].num > 2


def test_own_time_is_at_most_the_wall_time_and_above_none() -> None:
    outer, inner = OwnTime(), OwnTime()
    inner.start()
    outer.start()
    assert sum(range(10_000)) == 49_995_000
    assert outer.stop() > 0.0
    assert inner.stop() > 0.0
