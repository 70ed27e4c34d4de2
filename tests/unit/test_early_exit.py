"""Thresholds of early exit: on where rows that leave save time, off where they do not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.papers.faser_exit import (
    PRIOR_LOST,
    ExitPlan,
    ExitPrices,
    ExitSamples,
    WrongExits,
    choose_thresholds,
    kept_drafts,
    saved_per_span_s,
)

REMAINING = (0.5, 0.2)
PRICES = ExitPrices(pass_s=8.0, row_s=1.0, check_s=0.01, remaining=REMAINING)


def samples(
    separation: float, num_accepted: tuple[int, ...] = (0, 1, 3, 0), repeats: int = 16, seed: int = 0
) -> ExitSamples:
    """Spans of 4 drafts; the margin of a draft is normal, ``separation`` higher where it is rejected."""
    rng = np.random.default_rng(seed)
    accepted = np.tile(np.array(num_accepted), repeats)
    margins = rng.normal(size=(len(accepted), len(REMAINING), 4))
    margins += separation * (np.arange(4) >= accepted[:, None])[:, None]
    return ExitSamples(margins.astype(np.float32), np.full(len(accepted), 4), accepted)


def test_estimates_that_separate_are_used_early() -> None:
    plan = choose_thresholds(samples(10.0, repeats=64), PRICES)
    assert plan.thresholds[0] is not None
    assert plan.saved_share > 0.15
    assert plan.wrong_share < 0.02
    kept = kept_drafts(samples(10.0, seed=1), plan.thresholds)
    assert (kept == samples(10.0).num_accepted).mean() > 0.8


@pytest.mark.parametrize(
    ("separation", "prices"),
    [
        (0.0, ExitPrices(30.0, 1.0, 0.01, REMAINING)),  # tokens are dear, estimates say nothing
        (10.0, ExitPrices(8.0, 0.0, 0.01, REMAINING)),  # a row costs nothing, as at batch 1
        (10.0, ExitPrices(8.0, 1.0, 1.0, REMAINING)),  # a check costs as much as a row
        (10.0, ExitPrices(80.0, 1.0, 0.01, REMAINING)),  # the saving is within the error of the estimates
    ],
)
def test_off_where_it_does_not_pay(separation: float, prices: ExitPrices) -> None:
    plan = choose_thresholds(samples(separation), prices)
    assert plan.thresholds == (None, None)
    assert plan.saved_share == 0.0


def test_estimates_that_may_err_need_more_samples_than_the_exact_one() -> None:
    """The same margins at both checks: few samples hide what the first would lose, and the last one loses nothing."""
    prices = ExitPrices(40.0, 2.0, 0.01, (0.5, 0.4))
    few, many = samples(10.0, repeats=8), samples(10.0, repeats=128)
    assert [choose_thresholds(found, prices).thresholds[0] is None for found in (few, many)] == [True, False]
    assert choose_thresholds(few, prices).thresholds[1] is not None


def test_drafts_that_are_all_accepted_turn_it_off() -> None:
    assert choose_thresholds(samples(1.0, num_accepted=(4, 4, 4, 4)), PRICES).is_off


def test_no_samples_no_exits() -> None:
    nothing = ExitSamples(np.zeros((0, 2, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert choose_thresholds(nothing, PRICES).thresholds == (None, None)


def test_savings_are_counted_row_by_row() -> None:
    """One span of 4 drafts, of which 2 are accepted, cut at the second check behind draft 1."""
    margins = np.array([[[0, 0, 9, 0], [0, 5, 9, 0]]], np.float32)
    one = ExitSamples(margins, np.array([4]), np.array([2]))
    # first check: 4 rows checked, 2 leave; second: 2 checked, 1 leaves; one token of pass_s / 3 is lost
    expected = (2 * 0.5 + 1 * 0.2) * 1.0 - (4 + 2) * 0.01 - 8.0 / 3 * (1 + PRIOR_LOST)
    assert saved_per_span_s(one, PRICES, (7.0, 4.0)) == pytest.approx(expected)
    assert kept_drafts(one, (7.0, 4.0)).tolist() == [1]


@given(st.integers(0, 2**16), st.floats(0, 3), st.floats(0.0, 2.0), st.floats(0.0, 0.2))
def test_a_chosen_plan_is_worth_what_it_says(seed: int, separation: float, row_s: float, check_s: float) -> None:
    prices = ExitPrices(8.0, row_s, check_s, REMAINING)
    found = samples(separation, seed=seed, repeats=4)
    plan = choose_thresholds(found, prices)
    if not plan.is_off:
        assert saved_per_span_s(found, prices, plan.thresholds) == pytest.approx(plan.saved_share * prices.pass_s)


ONE_CHECK = ExitPrices(pass_s=8.0, row_s=2.0, check_s=0.01, remaining=(0.5,))


def at_one_check(*spans: tuple[int, float], num_drafts: int = 4) -> ExitSamples:
    """(accepted, margin of the first draft) of each; the margins of the others are 0."""
    margins = np.zeros((len(spans), 1, num_drafts), np.float32)
    margins[:, 0, 0] = [margin for _, margin in spans]
    return ExitSamples(margins, np.full(len(spans), num_drafts), np.array([accepted for accepted, _ in spans]))


def test_a_wrong_cut_is_worth_the_tokens_that_it_loses() -> None:
    """Nine spans are cut at once: 36 rows leave for half their time, 40 are checked, and one loses four tokens of 4.4 s."""
    spans = at_one_check(*[(0, 5.0)] * 8, (4, 0.0), (4, 6.0))
    plan = choose_thresholds(spans, ONE_CHECK)
    assert plan.saved_share == pytest.approx((36 * 0.5 * 2.0 - 40 * 0.01 - 4 * 8.0 / 1.8) / 10 / 8.0)
    assert plan.wrong_share == pytest.approx(1 / 9)
    milliseconds = ExitPrices(8e-3, 2e-3, 1e-5, (0.5,))
    assert choose_thresholds(spans, milliseconds).thresholds == plan.thresholds


@pytest.mark.parametrize("others", [(), ((1, 1.0),)])
def test_a_threshold_of_nothing_is_among_the_candidates(others: tuple[tuple[int, float], ...]) -> None:
    """Rejected drafts are beaten by little, and none, or one, was accepted."""
    assert choose_thresholds(at_one_check(*[(0, 0.05)] * 9, *others), ONE_CHECK).thresholds == (0.0,)


def test_wrong_cuts_are_summed_beyond_what_is_expected_and_the_sum_restarts() -> None:
    """Of a cut 0.04 wrong ones are allowed for, and six are too many."""
    plan, found = ExitPlan((1.0,), 0.1), WrongExits()
    assert [found.note(plan, 1, 6), found.note(plan, 1, 1)] == [False, True]
    assert not found.note(plan, 1, 6)
    assert not found.note(plan, 1000, 0)
    assert not found.note(plan, 1, 6)


def test_better_drafts_are_noticed_and_usual_ones_are_not() -> None:
    plan = choose_thresholds(samples(10.0), PRICES)
    steady, better = WrongExits(), WrongExits()
    assert not any(steady.note(plan, 50, 1) for _ in range(200))
    assert any(better.note(plan, 8, 8) for _ in range(3))
