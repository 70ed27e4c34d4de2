"""Collapse: found soon, seldom wrongly, and not for ever."""

from dataclasses import replace
from random import Random

import pytest

from router.assignment import Observation, PoolMember, Positions
from router.estimates.drift import DriftDetector, DriftState

SLOT_S = 0.25
MEMBER = PoolMember("d", 64, 0.1)


def watch() -> DriftDetector:
    return DriftDetector(SLOT_S)


def slot(random: Random, rate: float, member: str = "d", num_requests: int = 4, num_names: int = 50) -> list[Observation]:
    """Each request drafts ten times, of which its own share is right, about ``rate``."""
    seen = []
    for i in range(num_requests):
        own = min(max(random.gauss(rate, rate / 4), 0.0), 0.95)
        positions, num_accepted = Positions(), 0
        for _ in range(10):
            num_right = 0
            while num_right < 8 and random.random() < own:
                num_right += 1
            num_accepted += num_right
            positions = positions.plus(num_right, failed=num_right < 8)
        name = f"r{i}-{random.randrange(num_names)}"
        seen.append(Observation(name, member, 10, 80, num_accepted, 10 + num_accepted, 0.3, positions))
    return seen


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.6, 0.9])
def test_a_collapse_is_found_within_seconds(rate: float) -> None:
    watched, random = watch(), Random(1)
    for _ in range(200):
        watched.observe(slot(random, rate))
    assert watched.judge(MEMBER) == MEMBER
    num_slots = 0
    while watched.state("d") is DriftState.OPEN:
        watched.observe(slot(random, 0.0))
        num_slots += 1
        assert num_slots < 100
    assert num_slots <= (40 if rate < 0.2 else 8)
    assert not watched.judge(MEMBER).is_open


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6, 0.9])
def test_what_varies_as_usual_is_no_collapse(rate: float) -> None:
    watched, random = watch(), Random(2)
    for _ in range(4000):  # a quarter of an hour
        watched.observe(slot(random, rate))
        assert watched.state("d") is DriftState.OPEN


def test_drafts_that_come_too_late_are_no_collapse() -> None:
    """Whoever is slow, or catches up, has drafted nothing wrong."""
    watched, random = watch(), Random(4)
    for _ in range(200):
        watched.observe(slot(random, 0.6))
    for number in range(400):
        watched.observe([Observation(f"late-{number}-{i}", "d", 10, 0, 0, 10, 0.3, num_missed=10) for i in range(4)])
        assert watched.state("d") is DriftState.OPEN


def test_harder_requests_are_no_collapse() -> None:
    watched, random = watch(), Random(3)
    for _ in range(400):
        watched.observe(slot(random, 0.7))
    for _ in range(2000):
        watched.observe(slot(random, 0.45))
        assert watched.state("d") is DriftState.OPEN


def test_one_request_alone_does_not_put_a_drafter_out() -> None:
    watched, random = watch(), Random(4)
    for _ in range(100):
        watched.observe(slot(random, 0.6))
    for _ in range(30):  # one that nothing is right of, among three
        watched.observe([*slot(random, 0.6, num_requests=3), *slot(random, 0.0, num_requests=1, num_names=1)])
        assert watched.state("d") is DriftState.OPEN


def quarantined(random: Random) -> DriftDetector:
    watched = watch()
    for _ in range(200):
        watched.observe(slot(random, 0.6))
    while watched.state("d") is DriftState.OPEN:
        watched.observe(slot(random, 0.0))
    return watched


def slots_out(watched: DriftDetector) -> int:
    num_slots = 0
    while watched.state("d") is DriftState.QUARANTINED:
        watched.observe([])
        num_slots += 1
    return num_slots


def test_it_is_tried_with_few_requests_and_taken_back_when_it_is_well() -> None:
    random = Random(5)
    watched = quarantined(random)
    assert slots_out(watched) == 240  # a minute
    tried = watched.judge(MEMBER)
    assert tried.is_open
    assert tried.capacity == 2
    while watched.state("d") is DriftState.ON_TRIAL:
        watched.observe(slot(random, 0.55, num_requests=2))
    assert watched.judge(MEMBER) == MEMBER


def test_it_is_out_for_longer_and_longer_while_it_is_ill() -> None:
    random = Random(6)
    watched = quarantined(random)
    lengths = []
    for _ in range(5):
        lengths.append(slots_out(watched))
        while watched.state("d") is DriftState.ON_TRIAL:
            watched.observe(slot(random, 0.0, num_requests=2))
    assert lengths == [240, 480, 960, 1920, 2400]


def test_what_stays_becomes_usual() -> None:
    """A drafter that the workload has left is not kept out for ever."""
    random = Random(7)
    watched = quarantined(random)
    for _ in range(8):
        slots_out(watched)
        while watched.state("d") is DriftState.ON_TRIAL:
            watched.observe(slot(random, 0.08, num_requests=2))
    assert watched.state("d") is DriftState.OPEN


def test_a_replica_is_judged_by_what_is_usual_for_its_drafter() -> None:
    watched, random = watch(), Random(8)
    for _ in range(100):
        watched.observe(slot(random, 0.6, "d"))
    for _ in range(20):
        watched.observe([*slot(random, 0.6, "d"), *slot(random, 0.0, "d/1")])
    assert watched.state("d/1") is DriftState.QUARANTINED
    assert watched.state("d") is DriftState.OPEN


def test_requests_that_differ_much_are_no_collapse() -> None:
    """Half of them are of a kind that hardly anything is right of, and the same ones stay for long."""
    watched, random = watch(), Random(10)
    for i in range(1000):
        kinds = (("bad", 0.05), ("good", 0.7))
        named = [(kind, one) for kind, rate in kinds for one in slot(random, rate, num_requests=3, num_names=1)]
        seen = [replace(one, request_id=f"{kind}-{one.request_id}-{i // 40}") for kind, one in named]
        watched.observe(seen)
        assert watched.state("d") is DriftState.OPEN


def test_one_hard_text_puts_nobody_out_however_long_it_is() -> None:
    watched, random = watch(), Random(11)
    for _ in range(100):
        watched.observe(slot(random, 0.6))
    for _ in range(2000):
        watched.observe(slot(random, 0.0, num_requests=1, num_names=1))
    assert watched.state("d") is DriftState.OPEN
