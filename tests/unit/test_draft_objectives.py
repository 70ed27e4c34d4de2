"""What objectives change in draft budgets."""

from dataclasses import replace

import pytest

from cluster.config import DraftLengthConfig
from cluster.types import DraftTerms
from router.cost_model import TableCost
from router.drafting.length_rule import longest_draft, weighted
from router.drafting.policies import build_draft_lengths
from router.drafting.value import DraftingValue
from router.plan import DrafterView, SequenceView
from router.planning.slo import NO_LIMITS, RoundLimits, Stream

COST = TableCost((1, 1001), (0.01, 0.01))
DRAFTERS = {"d": DrafterView(0.04, 4.0, 0.8, draft_s=0.04, batch=2.0, draft_len=8.0)}  # 5 ms for each token of a batch
BUDGET = DraftTerms(8, 0.2, 100.0)


def view(name: str, drafter: str | None = "d") -> SequenceView:
    return SequenceView(name, 20, 19, 0, True, drafter, None, 50)


def round_s(length: int) -> float:
    return 0.01 + 0.005 * length


def longest(*streams: Stream, acceptance: float = 0.0) -> int:
    return longest_draft(streams, lambda request_id: acceptance, round_s, 8)


def test_rows_of_a_request_that_falls_behind_cost_it_less_and_others_more() -> None:
    views = [view(name) for name in ("behind", "far", "ahead", "free")]
    budgets = {one.request_id: BUDGET for one in views}
    assert weighted(budgets, views, {}, {}) == budgets
    found = weighted(budgets, views, {"behind": 2.0, "far": 4.0}, {})
    assert {name: one.row_price for name, one in found.items()} == {
        "behind": pytest.approx(0.2),  # of the mean weight
        "far": pytest.approx(0.1),
        "ahead": pytest.approx(0.4),
        "free": pytest.approx(0.4),
    }
    assert found["ahead"] is found["free"], "comparing budgets is quick"
    assert all(replace(one, row_price=0.2) == BUDGET for one in found.values())
    dear = weighted({one.request_id: replace(BUDGET, row_price=0.9) for one in views}, views, {"far": 4.0}, {})
    assert dear["free"].row_price == 1.0


def test_requests_that_are_not_drafted_for_stay_so() -> None:
    paused, plain = DraftTerms(0, 0.2), view("plain", None)
    views = [view("paused"), view("behind"), plain]
    found = weighted({"paused": paused, "behind": BUDGET}, views[:2], {"behind": 2.0, "paused": 3.0}, {"d": 5})
    assert found["paused"] is paused
    assert found["behind"].num_tokens == 5
    assert "plain" not in found


def test_a_round_takes_what_the_tokens_of_each_stream_are_worth() -> None:
    assert longest() == 8
    assert longest(Stream("a", 0.021, -1.0)) == 2, "it commits one token of a request that is mostly wrong"
    assert longest(Stream("a", 0.021, 0.0101)) == 4, "or more while it is ahead"
    assert longest(Stream("a", 0.011, -1.0), acceptance=0.8) == 7, "4.16 tokens in 45 ms"
    assert longest(Stream("a", 0.021, -1.0), Stream("b", 0.03, 0.0)) == 2, "the tightest counts"


def test_what_no_length_can_meet_costs_others_nothing_and_drafts_of_others_never_end() -> None:
    assert longest(Stream("a", 0.009, -1.0)) == 8
    assert longest(Stream("a", 0.0105, -1.0)) == 1


class TestOutrider:
    @staticmethod
    def budgets(limits: RoundLimits, num_micro_batches: int = 1) -> dict[str, DraftTerms]:
        lengths = build_draft_lengths(DraftLengthConfig(), {"d": 8})
        batch = DraftingValue(COST, DRAFTERS, 0.25, 100.0, num_micro_batches, limits)
        return lengths.budgets([view("a"), view("b")], batch)

    def test_without_objectives_nothing_changes(self) -> None:
        found = self.budgets(NO_LIMITS)
        assert found == self.budgets(RoundLimits())
        assert found["a"] is found["b"]
        assert (found["a"].num_tokens, found["a"].row_price) == (8, 0.25)

    def test_prices_follow_weights_and_lengths_the_round(self) -> None:
        found = self.budgets(RoundLimits(weights={"a": 3.0}))
        assert (found["a"].row_price, found["b"].row_price) == (pytest.approx(0.25 / 1.5), pytest.approx(0.5))
        assert {one.num_tokens for one in found.values()} == {8}
        # 10 ms for the pass and 5 for each draft token; 1 + 0.8 + 0.64 tokens are expected with two.
        pressed = RoundLimits(streams=(Stream("b", 0.0083, 0.0),))
        assert {one.num_tokens for one in self.budgets(pressed).values()} == {2}
        assert {one.num_tokens for one in self.budgets(pressed, num_micro_batches=2).values()} == {8}, (
            "drafts are not awaited"
        )
