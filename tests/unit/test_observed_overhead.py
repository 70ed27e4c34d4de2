"""What rounds with chains turn out to be, and whether requests are all with one."""

from math import exp

import numpy as np
import pytest

from router.assignment import Observation
from router.papers.specrouter_estimates import (
    SPREAD,
    TRIAL_SLOTS,
    Choice,
    DrafterChoice,
    FillRates,
    ObservedOverheads,
    seated,
)
from tests.support.observations import right_at

NAMES = ("", "lookup", "model")


def test_a_lookup_that_is_mostly_silent_takes_few_rows() -> None:
    fills = FillRates(memory=100)
    assert fills.of("lookup", 8) == 1.0
    for _ in range(50):
        fills.observe([Observation("r", "lookup/1", 10, 16, 8, 18, 1.0, right_at(10, 8))])
    assert fills.of("lookup", 8) == pytest.approx(0.2, abs=0.08)
    fills.observe([Observation("r", "large", 10, 16, 8, 18, 1.0, right_at(10, 8))])
    assert fills.of("large", 8) == pytest.approx((16 / 8 + 8) / (10 + 8)), "with eight whole drafts before the first"
    assert fills.of("large", 1) == 1.0, "drafts were longer once"
    fills.observe([Observation("r", "model", 10, 0, 0, 10, 1.0, num_missed=10)])
    assert fills.of("model", 8) == 1.0, "what was late says nothing of what is verified"


def test_a_deviation_counts_less_nine_times_its_squared_error_over_its_square() -> None:
    """Slots of predicted 2 and 1 s that took 3 and 2, then two of 1 s that took 0.5: a slot fades by exp(-1/400)."""
    overruns = ObservedOverheads()
    for chain, measured_s, predicted_s in (("a", 3.0, 2.0), ("a", 2.0, 1.0), ("b", 0.5, 1.0), ("b", 0.5, 1.0)):
        overruns.observe({(chain,): (predicted_s, measured_s), SPREAD: (0.0, 1.0)})
    f = exp(-1 / 400)
    slots = f**3 + f**2, f + 1
    predicted, measured = (2 * f**3 + f**2, f + 1), (3 * f**3 + 2 * f**2, 0.5 * (f + 1))
    squares = 4.5 * f**3 + 4 * f**2, 0.25 * (f + 1)
    ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
    residue = sum(max(0.0, s - r * m) for s, r, m in zip(squares, ratios, measured, strict=True))
    per_second = residue / (sum(slots) - 2)
    factors = [1 + (r - 1) * max(0.0, 1 - 9 * per_second / p / (r - 1) ** 2) for r, p in zip(ratios, predicted, strict=True)]
    assert list(overruns.factors().values()) == pytest.approx(factors, rel=1e-9)
    assert 1.0 < factors[0] < ratios[0]


def test_a_slot_that_has_nearly_faded_counts_as_far_as_it_has_not() -> None:
    overruns = ObservedOverheads()
    for _ in range(3):
        overruns.observe({("a",): (1.0, 2.0)})
    for _ in range(800):
        overruns.observe({})
    slots = exp(-2) * (1 + exp(-1 / 400) + exp(-2 / 400))
    assert overruns.factors() == {("a",): 1.0}, "less than a slot to tell chance by"
    for _ in range(3):
        overruns.observe({("b",): (1.0, 2.0)})
    slots *= exp(-3 / 400)
    assert overruns.factors() == pytest.approx({("a",): 1.0 + slots, ("b",): 2.0})


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    overruns = ObservedOverheads()
    for _ in range(40):
        overruns.observe({("slow",): (1.0, 2.0)})
    before = overruns.factors()["slow",]
    for _ in range(3000):
        overruns.observe({})
    assert before > 1.8
    assert overruns.factors()["slow",] == pytest.approx(1.0, abs=0.1)
    for _ in range(3000):
        overruns.observe({})
    assert overruns.factors() == {}, "chains that pools once allowed are not kept for ever"


def chosen(choosing: DrafterChoice, *seconds: tuple[float, ...], spread: float = 1.0) -> Choice:
    return choosing.choose(NAMES, np.array(seconds), (8, 8, 8), spread)


def test_requests_are_spread_where_that_is_foreseen_to_be_faster_and_does_not_turn_out_slower() -> None:
    unlike = ((3.0, 1.0, 2.0), (3.0, 3.0, 2.0))
    assert chosen(DrafterChoice(), *unlike) is SPREAD
    assert chosen(DrafterChoice(), *unlike, spread=1.6) == "lookup"
    assert chosen(DrafterChoice(), (3.0, 1.0, 2.0), (3.0, 1.0, 2.0)) == "lookup"
    assert chosen(DrafterChoice(), (1.0, np.inf, 2.0)) == ""


def test_requests_are_not_spread_for_less_than_estimates_are_off_nor_longer_than_it_is_as_fast_as_predicted() -> None:
    assert chosen(DrafterChoice(), (3.0, 1.0, 2.0), (3.0, 1.0, 0.95)) == "lookup"
    choosing = DrafterChoice()
    unlike = ((3.0, 1.0, 2.0), (3.0, 3.0, 2.0))
    assert chosen(choosing, *unlike) is SPREAD
    assert chosen(choosing, *unlike, spread=1.01) is SPREAD, "slower than predicted, and the fastest"
    assert chosen(choosing, (3.0, 1.0, 2.0), (3.0, 2.0, 1.99)) is SPREAD, "on trial, and as fast as predicted"
    assert chosen(choosing, *unlike, spread=1.6) == "lookup", "its trial ends"
    assert chosen(choosing, *unlike, spread=1.01) == "lookup", "on trial, and not spread"


def test_a_choice_that_rests_on_nothing_is_no_trial() -> None:
    choosing = DrafterChoice()
    assert chosen(choosing, (3.0, 1.0, 2.0)) == "lookup"
    assert not choosing.is_settled
    choosing.release()
    assert choosing.is_settled
    assert chosen(choosing, (3.0, 2.5, 2.0)) == "model"


def test_a_choice_is_given_some_time_unless_it_cannot_be_had() -> None:
    choosing = DrafterChoice()
    assert chosen(choosing, (3.0, 1.0, 2.0)) == "lookup"
    found = [chosen(choosing, (3.0, 2.5, 2.0)) for _ in range(TRIAL_SLOTS)]
    assert found == ["lookup"] * (TRIAL_SLOTS - 1) + ["model"]
    assert chosen(choosing, (3.0, 4.0, np.inf)) == ""
    of_few, places = DrafterChoice(), (8, 8, 1)
    assert of_few.choose(NAMES, np.array([(3.0, 2.9, 1.0)] * 2), places, 1.0) == "model"
    assert of_few.choose(NAMES, np.array([(3.0, 2.9, np.inf)] * 2), places, 1.0) == "lookup", "at once"


def test_a_drafter_is_judged_by_those_whom_it_has_a_place_for() -> None:
    """It is the fastest for all eight, and two can be with it: the others are elsewhere, and share no pass with them."""
    seconds = np.array([(3.0, 1.2, 1.0)] * 8)
    for num_places, spread, choice in ((8, 1.5, "model"), (2, 1.5, "lookup"), (2, 1.0, "model"), (0, 1.0, "lookup")):
        assert DrafterChoice().choose(NAMES, seconds, (8, 8, num_places), spread) == choice


def test_places_at_what_is_chosen_go_to_those_who_gain_by_it() -> None:
    seconds = np.array([(3.0, 0.1, 2.9), (3.0, 2.9, 1.0)])
    assert seated(seconds, (2, 2, 1), 2) == [1, 2]
    assert seated(seconds, (2, 1, 1), None) == [1, 2]
    assert seated(np.array([(3.0, 1.0, 2.0), (3.0, 0.5, 1.0)]), (2, 1, 2), None) == [2, 1]
    assert seated(np.array([(3.0, 1.0, 2.0), (3.0, 0.5, 1.0)]), (2, 1, 2), None, last=[1]) == [1, 2]
    assert seated(np.array([(3.0, 1.0, 2.0), (3.0, 0.5, 1.0)]), (2, 0, 1), 2, last=[0]) == [0, 2]
