"""Which outcomes of a verification are likely, and how many are worth preparing, against cases worked by hand."""

import pytest

from router.estimates.draft_times import DraftTimes
from router.papers.saguaro import RunnerUpRates, num_prepared, outcomes


def test_a_position_is_as_likely_as_survival_falls_there_and_rates_divide_it() -> None:
    found = outcomes([0.8, 0.4], [(7, 8), (9,)], (0.5, 0.25))
    assert [(o.num_accepted, o.token_id) for o in found] == [(0, 7), (0, 8), (1, 9)]
    assert [o.probability for o in found] == pytest.approx([0.1, 0.05, 0.2])
    assert outcomes([0.8, 0.4], [(7, 8), (9,)], (0.5, 0.25), first=1) == found[2:]


def test_rates_are_learned_from_what_the_target_chose_instead() -> None:
    rates = RunnerUpRates()
    for _ in range(200):
        rates.note((1, 2), 2)
    first, second = rates.rates
    assert first < 0.05
    assert second > 0.95


def test_free_rows_are_all_used_and_those_that_cost_only_while_they_gain() -> None:
    probabilities = [0.2, 0.1, 0.05, 0.01]
    assert num_prepared(0.5, probabilities, 1, 1, 4, 1.0, lambda rows: 0.1) == 4
    assert num_prepared(0.5, probabilities, 1, 1, 4, 1.0, lambda rows: 0.1 * rows) == 1, "three rows end too late"


def test_steps_of_more_rows_are_taken_to_be_fast_until_measured_and_again_after_long() -> None:
    times = DraftTimes(0.0)
    assert times.at(4) == 0.0
    for _ in range(20):
        times.add(1, 0.01)
    assert times.at(4) == times.at(1) == pytest.approx(0.01)
    for _ in range(20):
        times.add(4, 0.03)
    assert times.at(4) > 0.025
    assert times.at(1) == pytest.approx(0.01, rel=0.05)
    for _ in range(10_000):
        times.add(1, 0.01)
    assert times.at(4) < 0.0125, "it is tried again"


def test_nothing_is_drafted_that_delays_more_than_it_gains_or_whose_time_is_unknown() -> None:
    assert num_prepared(0.1, [0.01], 1, 1, 4, 0.0, lambda rows: 0.1) is None
    assert num_prepared(0.9, [], 1, 1, 4, 0.0, lambda rows: 0.1) == 0
    assert num_prepared(0.9, [0.5], 1, 1, 4, 1.0, lambda rows: 0.0) is None


def test_outcomes_that_are_unlikely_or_unknown_are_left_out() -> None:
    assert [o.token_id for o in outcomes([0.9, 0.4], [(7, 8), (9,)], (0.5, 0.05))] == [7, 9], "0.1 * 0.05 is too little"
    assert [o.token_id for o in outcomes([0.8, 0.8], [(7,), (9,)], (0.5,))] == [7], "the second is never rejected"
    assert len(outcomes([0.8, 0.4, 0.1], [(7,)], (0.5,))) == len(outcomes([0.8], [(7,), (9,)], (0.5,))) == 1


@pytest.mark.parametrize(("others", "best"), [([0.4], 0), ([0.6], 1), ([0.6, 0.0], 1)])
def test_fewer_steps_and_a_commit_that_waits_count_against_an_outcome(others: list[float], best: int) -> None:
    """A step over r rows takes 0.1 + 0.05 r s. Without another outcome four are made before the commit, and the gain is
    0.2 * 4 * 0.3 = 0.24 s; with one more three, in 0.2 s each, and it is 0.2 * 3 * P - 2 * 0.1 s."""
    assert num_prepared(0.3, others, 1, 2, 4, 0.7, lambda rows: 0.1 + 0.05 * rows) == best


def test_an_outcome_may_be_all_that_is_prepared_and_a_step_is_always_made() -> None:
    assert num_prepared(0.0, [0.5], 0, 1, 4, 1.0, lambda rows: 0.1) == 1
    assert num_prepared(0.4, [], 1, 1, 4, 0.0, lambda rows: 0.1) is None, "0.04 s are gained, and 0.05 waited"
