"""When a drafter ends the drafts of a batch, by the terms that it was sent."""

from dataclasses import replace

import pytest

from cluster.types import NO_DRAFTS, DraftTerms
from drafters.draft_stops import DraftStops, cut_lens
from drafters.protocol import Demand
from router.drafting.stopping import DraftProgress, continuing


def draft(*confidences: float, price: float = 0.0, stop: DraftTerms = NO_DRAFTS, is_open: bool = True) -> DraftProgress:
    survival, expected_len = 1.0, 0.0
    for confidence in confidences:
        survival *= confidence
        expected_len += survival
    terms = replace(stop, row_price=price)
    return DraftProgress(terms, survival, confidences[-1], survival, expected_len, len(confidences), is_open)


class TestByPrice:
    def test_a_token_that_is_hardly_worth_its_row_is_not_drafted(self) -> None:
        # 0.9 * 0.5 = 0.45 survives so far; half of the price is the limit.
        assert continuing([draft(0.9, 0.5, price=0.8)], 0.0, 2, 1.0) == [True]
        assert continuing([draft(0.9, 0.5, price=0.95)], 0.0, 2, 1.0) == [False]
        assert continuing([draft(0.9, 0.5, price=0.8)], 0.0, 2, 0.8) == [False], (
            "the next token is no more certain than usual"
        )

    def test_a_step_must_gain_what_all_requests_could_be_decoded_meanwhile(self) -> None:
        waits = DraftTerms(second_price=20.0)
        sure, unsure = draft(0.9, price=0.1, stop=waits), draft(0.2, price=0.1, stop=waits)
        # Gains 0.8 and 0.1; a step of 10 ms costs 0.2 for each request.
        assert continuing([sure], 0.01, 1, 1.0) == [True]
        assert continuing([unsure], 0.01, 1, 1.0) == [False]
        assert continuing([sure, unsure], 0.01, 1, 1.0) == [True, True], "together they gain 0.9 for 0.4"
        assert continuing([sure, *[unsure] * 9], 0.01, 1, 1.0) == [False] * 10, "1.7 for 2.0"

    def test_who_has_ended_waits_all_the_same(self) -> None:
        waits = DraftTerms(second_price=20.0)
        others = [draft(0.9, stop=waits, is_open=False)] * 4
        assert continuing([draft(0.9, stop=waits), *others], 0.01, 1, 1.0)[0] is False
        assert continuing([draft(0.9, stop=waits), *others[:3]], 0.01, 1, 1.0)[0] is True

    def test_what_takes_no_time_goes_on_while_rows_pay(self) -> None:
        assert continuing([draft(0.2, stop=DraftTerms(second_price=20.0))], 0.0, 1, 1.0) == [True]


def test_a_threshold_ends_a_draft_with_the_first_token_below_it() -> None:
    stop = DraftTerms(min_confidence=0.5)
    drafts = [draft(0.9, 0.6, stop=stop), draft(0.9, 0.4, stop=stop), draft(0.6, 0.6, 0.6, stop=stop)]
    assert continuing(drafts, 0.0, 2, 1.0) == [True, False, True], "of the token, not of the draft"


class TestAdaSpec:
    """Algorithm 1, worked by hand: throughput is (1 + survivals) / (1 + steps + rows), all times in plain passes."""

    def test_the_batch_goes_on_while_the_predicted_throughput_rises(self) -> None:
        # After 0.8: 1.8 tokens in 1 + 0.2 + 0.1 = 1.3 passes, 1.385. Expected 0.8 * 0.7: 2.36 in 1.6 is 1.475.
        stop = DraftTerms(second_price=20.0, expected_confidence=0.7)
        assert continuing([draft(0.8, price=0.1, stop=stop)], 0.01, 1, 1.0) == [True]
        # Expected 0.8 * 0.5: 2.2 in 1.6 is 1.375.
        stop = DraftTerms(second_price=20.0, expected_confidence=0.5)
        assert continuing([draft(0.8, price=0.1, stop=stop)], 0.01, 1, 1.0) == [False]

    def test_what_was_drafted_corrects_the_prediction(self) -> None:
        stop = DraftTerms(second_price=20.0, expected_confidence=0.9)
        assert continuing([draft(0.9, price=0.1, stop=stop)], 0.01, 1, 1.0) == [True]
        assert continuing([draft(0.3, price=0.1, stop=stop)], 0.01, 1, 1.0) == [False]

    def test_the_length_is_one_for_the_batch(self) -> None:
        stop = DraftTerms(second_price=20.0, expected_confidence=0.9)
        sure, unsure = draft(0.95, price=0.1, stop=stop), draft(0.03, price=0.1, stop=stop)
        assert continuing([sure, unsure], 0.001, 1, 1.0) == [True, True]
        assert continuing([sure, *[unsure] * 9], 0.001, 1, 1.0) == [False] * 10


def test_drafts_that_are_made_at_once_are_cut_where_steps_would_have_ended() -> None:
    stop = DraftTerms(min_confidence=0.5)
    demands = [Demand("a", 8, terms=stop), Demand("b", 8, terms=stop), Demand("c", 8, terms=stop)]
    drafted = [(0.9, 0.3, 0.9), (), (0.9, 0.9)]
    assert cut_lens(demands, drafted, DraftStops()) == [2, 0, 2]
    assert cut_lens([Demand(d.request_id, 8) for d in demands], drafted, DraftStops()) == [3, 0, 2], "without terms"


@pytest.mark.parametrize("is_right", [True, False])
def test_confidences_are_calibrated_by_what_became_of_the_drafts(is_right: bool) -> None:
    """A drafter that says 0.6 and is never right stops after its first token; one that is always right goes on."""
    stops, demand = DraftStops(), Demand("r", 4, terms=DraftTerms(row_price=0.6))
    assert stops.continuing([demand], [(0.6,)], [True], 1) == [True]
    for _ in range(400):
        stops.note_draft(demand, (1, 2, 3), (0.6, 0.6, 0.6))
        stops.extend("r", (1, 2, 3, 4) if is_right else (9,))
    assert stops.continuing([demand], [(0.6, 0.6)], [True], 2) == [is_right]
