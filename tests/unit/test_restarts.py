"""When a process that ended is started again."""

import pytest

from actors.processes import RestartPolicy
from cluster.config import SupervisionConfig

CONFIG = SupervisionConfig(quarantine_restarts=4)


def pauses_s(policy: RestartPolicy, times_s: list[float]) -> list[float]:
    return [policy.failed(now_s).at_s - now_s for now_s in times_s]


def test_first_restart_comes_at_once_and_further_ones_after_doubled_pauses() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=False)
    assert pauses_s(policy, [0, 1, 2, 3, 4, 5, 6]) == pytest.approx([0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0])
    assert policy.num_restarts == 7


def test_thousands_of_failures_stay_at_the_longest_pause() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=False)
    assert pauses_s(policy, [i / 1000 for i in range(5000)])[-1] == pytest.approx(5.0)


def test_a_drafter_that_fails_too_often_within_the_window_is_quarantined_and_then_starts_afresh() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=True)
    outcomes = [policy.failed(now_s) for now_s in (0, 1, 2, 3)]
    assert [outcome.quarantined for outcome in outcomes] == [False, False, False, True]
    assert outcomes[-1].at_s == 3 + 120
    again = policy.failed(123)
    assert (again.quarantined, again.at_s) == (False, 123)


def test_failures_that_are_far_apart_count_as_first_ones() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=True)
    outcomes = [policy.failed(i * 61.0) for i in range(20)]
    assert not any(outcome.quarantined for outcome in outcomes)
    assert all(outcome.at_s == i * 61.0 for i, outcome in enumerate(outcomes))


def test_what_the_service_needs_is_never_quarantined() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=False)
    assert not any(policy.failed(now_s).quarantined for now_s in range(50))
