"""How far requests are drafted for, and what a row costs."""

from dataclasses import replace

import pytest

from cluster.types import Commit, DraftTerms
from engine.pass_costs import PassCosts, PassCounts
from router.cost_model import TableCost
from router.drafting.length import DraftLengths
from router.drafting.value import PRICE_STEPS, DecodeRate, DraftingValue, row_price
from router.plan import DrafterView, SequenceView

COST = TableCost((1, 8, 16, 32), (0.01, 0.01, 0.026, 0.042))


def view(name: str, drafter: str | None) -> SequenceView:
    return SequenceView(name, 20, 19, 0, True, drafter, None, 50)


def test_each_request_is_drafted_for_as_far_as_its_drafter_goes() -> None:
    lengths = DraftLengths({"a": 4, "b": 12})
    sequences = [view("r", "a"), view("s", "b/1"), view("t", None), view("u", "unknown"), view("v", "a")]
    budgets = lengths.budgets(sequences, DraftingValue(COST, row_price=0.25))
    assert {key: budget.num_tokens for key, budget in budgets.items()} == {"r": 4, "s": 12, "u": 8, "v": 4}
    assert {budget.row_price for budget in budgets.values()} == {0.25}


def test_a_price_that_hardly_moves_stays_the_same() -> None:
    lengths = DraftLengths({"a": 4})
    budgets = [
        lengths.budgets([view("r", "a")], DraftingValue(COST, row_price=price))["r"]
        for price in (0.25, 0.25 + 0.4 / PRICE_STEPS, 0.3)
    ]
    assert budgets[0] is budgets[1]
    assert budgets[2] == DraftTerms(4, pytest.approx(0.3, abs=0.5 / PRICE_STEPS))


def decoded_over_plain(rate: DecodeRate) -> float:
    assert rate.over_plain is not None
    return rate.over_plain


def test_a_row_costs_the_tokens_that_could_be_decoded_in_its_time() -> None:
    assert row_price(500.0, 12, 0, COST) == pytest.approx(0.002 * 500)
    assert row_price(500.0, 16, 0, COST) == pytest.approx(0.001 * 500), "at a knee the cheaper side"
    assert row_price(500.0, 2, 0, COST) == 0.0, "a row that is free"


def test_at_a_knee_a_row_is_worth_the_best_draft_token_that_has_none() -> None:
    """Up to 8 rows cost nothing, each further one a token, and beyond 16 half of one."""
    assert row_price(500.0, 8, 0, COST, 0.6) == pytest.approx(0.6)
    assert row_price(200.0, 8, 0, COST, 0.6) == pytest.approx(0.4), "it would pay beyond the knee, too"
    assert row_price(500.0, 7, 0, COST, 0.6) == 0.0, "there are more"
    assert row_price(500.0, 12, 0, COST, 0.6) == pytest.approx(1.0), "no knee"
    assert row_price(500.0, 16, 0, COST, 0.7) == pytest.approx(0.5), "the next row is cheaper"


def test_the_time_of_prompts_and_of_pauses_does_not_count() -> None:
    rate = DecodeRate()
    began_s = 0.0
    assert rate.over_plain is None, "before anything is known"
    for _ in range(10):
        rate.note(began_s, 8, 0.1, 2, 0.008)
        began_s += 0.116
    assert decoded_over_plain(rate) == pytest.approx(2.0)
    rate.interrupt()
    rate.note(began_s + 100.0, 8, 0.0, 2, 0.008)
    rate.note(began_s + 100.016, 8, 0.0, 2, 0.008)
    assert decoded_over_plain(rate) == pytest.approx(2.0)


def test_rounds_of_requests_that_have_only_begun_do_not_count() -> None:
    """A prompt of which only the last token is computed commits a token in a batch that does not decode."""
    costs = PassCosts(COST)
    begun = PassCounts(1, 0, 1, 1, 0, frozenset(), 0)
    for number in range(10):
        costs.plan(0, 0)
        costs.note(number * 0.1, 0.1, begun, [Commit("r", 10, (1,))], 0.0)
    costs.plan(8, 0)
    assert costs.planned.tokens_per_s == pytest.approx(8 / COST.step_s(8, 0))
    costs.plan(0, 0)
    for number in range(10, 20):
        costs.note(number * 0.1, 0.1, begun, [Commit("r", 10, (1,))], 0.0)
    costs.plan(8, 0)
    assert costs.planned.tokens_per_s == pytest.approx(8 / COST.step_s(8, 0)), "nor by the price of the batch before"


def test_the_value_of_a_second_follows_the_batch_at_once() -> None:
    """As many tokens over plain decoding as so far, of the batch that is there: a mean rate would lag behind a burst."""
    costs = PassCosts(COST)
    costs.plan(8, 0)
    assert costs.planned.tokens_per_s == pytest.approx(8 / COST.step_s(8, 0)), "plain decoding, before anything is known"
    decoded = PassCounts(8, 0, 8, 8, 0, frozenset(), 0)
    commits = [Commit(str(i), 10, (1, 2), num_proposed=1, num_accepted=1) for i in range(8)]
    for number in range(10):
        costs.plan(8, 0)
        costs.note(number * COST.step_s(8, 0), COST.step_s(8, 0), decoded, commits, 0.0)
    for batch in (1, 16, 2):
        costs.plan(batch, 0)
        assert costs.planned.tokens_per_s == pytest.approx(2 * batch / COST.step_s(batch, 0))


def test_a_burst_does_not_count_as_fast_decoding() -> None:
    """Rounds of a large batch have more tokens than those before, and as many over plain decoding."""
    rate, began_s = DecodeRate(), 0.0
    for batch in (1, 64, 1):
        plain_s = COST.step_s(batch, 0)
        for _ in range(100):
            rate.note(began_s, 2 * batch, 0.0, batch, plain_s)
            began_s += 1.25 * plain_s
            if rate.over_plain is not None:
                assert rate.over_plain == pytest.approx(1.6)


def test_a_long_pause_within_a_round_hardly_counts() -> None:
    rate, began_s = DecodeRate(), 0.0
    for pause_s in (*[0.0] * 64, 10.0, 0.0):
        rate.note(began_s, 2, 0.0, 1, 0.01)
        began_s += 0.01 + pause_s
    assert decoded_over_plain(rate) == pytest.approx(2.0, rel=0.05)


def test_the_price_of_a_row_at_a_knee_is_that_of_what_is_left_out() -> None:
    costs = PassCosts(COST)
    costs.plan(8, 0)
    at_knee = PassCounts(8, 0, 8, 8, 0, frozenset(), 0)
    commits = [Commit(str(i), 10, (1,)) for i in range(8)]
    for left_out, price in ((0.0, 0.0), (0.6, 0.3)):
        costs.note(0.0, 0.01, at_knee, commits, left_out)
        assert costs.row_price == pytest.approx(price, abs=0.02), "a mean of the passes"


def test_the_price_of_a_row_does_not_swing_with_each_pass_at_a_knee() -> None:
    """By the last pass alone everybody would draft in every other round."""
    costs, prices = PassCosts(COST), []
    for number in range(64):
        num_rows = (4, 12)[number % 2]  # below and beyond the knee at 8 rows
        costs.plan(4, 0)
        counts = PassCounts(num_rows, 0, 4, num_rows, 0, frozenset(), 0)
        commits = [Commit(str(i), 10, (1,), num_proposed=num_rows // 4 - 1) for i in range(4)]
        costs.note(number * 0.01, COST.step_s(num_rows, 0), counts, commits, 0.0)
        prices.append(costs.row_price)
    beyond = row_price(costs.planned.tokens_per_s, 12, 0, COST)
    assert beyond > 0.1
    assert all(0.3 * beyond < price < 0.7 * beyond for price in prices[32:])


def test_drafts_take_as_long_as_measured_with_the_transit_of_replies_and_before_that_as_profiled() -> None:
    class Profiled(TableCost):
        def draft_s(self, drafter: str, batch: int, draft_len: int) -> float:  # type: ignore[override]
            return 0.001 * draft_len

    cost, usual = Profiled((1, 64), (0.01, 0.01)), DrafterView(0.08, 3.0, 0.8, batch=4.0, draft_len=8.0)

    def drafting_s(**measured: float) -> float:
        return DraftingValue(cost, {"d": replace(usual, **measured)}).draft_s("d", 4, 4)

    assert drafting_s() == pytest.approx(0.004)
    assert drafting_s(draft_s=0.002) == pytest.approx(0.001), "a cascade whose most expensive member is seldom queried"
    assert drafting_s(draft_s=0.08, transit_s=0.01) == pytest.approx(0.05), "a drafter that became slow, on a distant device"
