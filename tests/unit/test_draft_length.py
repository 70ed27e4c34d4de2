"""How far requests are drafted for, and what a row costs."""

import pytest

from router.cost_model import TableCost
from router.draft_length import PRICE_STEPS, BatchState, DecodeRate, DraftLengths, row_price
from router.plan import DraftBudget, SequenceView

COST = TableCost((1, 8, 16, 32), (0.01, 0.01, 0.026, 0.042))


def view(name: str, drafter: str | None) -> SequenceView:
    return SequenceView(name, 20, 19, 0, True, drafter, None, 50)


def test_each_request_is_drafted_for_as_far_as_its_drafter_goes() -> None:
    lengths = DraftLengths({"a": 4, "b": 12})
    sequences = [view("r", "a"), view("s", "b/1"), view("t", None), view("u", "unknown"), view("v", "a")]
    budgets = lengths.budgets(sequences, BatchState(COST, row_price=0.25))
    assert {key: budget.num_tokens for key, budget in budgets.items()} == {"r": 4, "s": 12, "u": 8, "v": 4}
    assert {budget.row_price for budget in budgets.values()} == {0.25}


def test_a_price_that_hardly_moves_stays_the_same() -> None:
    lengths = DraftLengths({"a": 4})
    budgets = [
        lengths.budgets([view("r", "a")], BatchState(COST, row_price=price))["r"]
        for price in (0.25, 0.25 + 0.4 / PRICE_STEPS, 0.3)
    ]
    assert budgets[0] is budgets[1]
    assert budgets[2] == DraftBudget(4, pytest.approx(0.3, abs=0.5 / PRICE_STEPS))


def test_a_row_costs_the_tokens_that_could_be_decoded_in_its_time() -> None:
    rate = DecodeRate()
    assert row_price(rate.tokens_per_s, 8, 0, COST) == 0.0, "before anything is known"
    for number in range(10):
        rate.note(0.016 * number, 8, 0.0)
    assert rate.tokens_per_s == pytest.approx(500)
    assert row_price(rate.tokens_per_s, 12, 0, COST) == pytest.approx(0.002 * 500)
    assert row_price(rate.tokens_per_s, 16, 0, COST) == pytest.approx(0.001 * 500), "at a knee the cheaper side"
    assert row_price(rate.tokens_per_s, 2, 0, COST) == 0.0, "a row that is free"


def test_the_time_of_prompts_and_of_pauses_does_not_count() -> None:
    rate = DecodeRate()
    began_s = 0.0
    for _ in range(10):
        rate.note(began_s, 8, 0.1)
        began_s += 0.116
    assert rate.tokens_per_s == pytest.approx(500)
    rate.interrupt()
    rate.note(began_s + 100.0, 8, 0.0)
    rate.note(began_s + 100.016, 8, 0.0)
    assert rate.tokens_per_s == pytest.approx(500)
