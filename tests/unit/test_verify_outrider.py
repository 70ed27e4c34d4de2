"""The default verification policy: no other rows of a pass are better, whatever the cost."""

from dataclasses import replace

import pytest
from hypothesis import given

from router.cost_model import TableCost, padded
from tests.support.verification import Drawn, RowsAttend, a_pass, decide, decoding, passes

KNEE = TableCost((1, 8, 9, 64), (0.02, 0.02, 0.04, 0.4))
FLAT_THEN_STEEP = TableCost((1, 32, 64), (0.02, 0.02, 0.52))


@given(passes())
def test_no_other_lengths_give_more_tokens_per_second(drawn: Drawn) -> None:
    lens = drawn.lens_of(decide("outrider", drawn.batch, drawn.context))
    assert drawn.is_allowed(sum(lens))
    assert drawn.expected(lens) / drawn.seconds(sum(lens)) == pytest.approx(drawn.best_rate())


@given(passes(prompts=True))
def test_no_other_split_between_drafts_and_prompts_is_better(drawn: Drawn) -> None:
    most = drawn.context.num_prompt_tokens
    value = drawn.best_rate()
    prompt_s = drawn.context.cost.prefill_s(most, 0) / most

    def score(lens: tuple[int, ...], num_prompts: int) -> float:
        return drawn.expected(lens) + value * (prompt_s * num_prompts - drawn.seconds(sum(lens), num_prompts))

    rows = decide("outrider", drawn.batch, drawn.context)
    lens = drawn.lens_of(rows)
    assert drawn.least_prompts <= rows.num_prompt_tokens <= most
    assert drawn.is_allowed(sum(lens), rows.num_prompt_tokens)
    everything = [
        score(one, num)
        for one in drawn.choices()
        for num in range(drawn.least_prompts, most + 1)
        if drawn.is_allowed(sum(one), num) and (drawn.context.limit_s is None or fits(drawn, sum(one), num))
    ]
    assert score(lens, rows.num_prompt_tokens) == pytest.approx(max(everything), rel=1e-9, abs=1e-9)


def fits(drawn: Drawn, num_drafts: int, num_prompts: int) -> bool:
    """Within the limit, or the least that goes on in any case."""
    assert drawn.context.limit_s is not None
    least = num_drafts == 0 and num_prompts == drawn.least_prompts
    return least or drawn.seconds(num_drafts, num_prompts) <= drawn.context.limit_s


def test_prompts_do_not_wait_for_what_others_attend_to() -> None:
    """Their rows attend to nothing of the requests that decode: such passes had 16 prompt tokens, and prompts starved."""
    batch = [decoding(str(i), ()) for i in range(16)]
    one_pass = a_pass(RowsAttend((1, 512), (0.02, 0.5)), num_prompt_tokens=256, max_pass_tokens=512)
    assert decide("outrider", batch, one_pass).num_prompt_tokens == 256


def test_what_is_likely_to_survive_is_preferred_to_what_is_not() -> None:
    batch = [decoding("sure", (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)), decoding("vague", (0.3, 0.1, 0.05, 0.02, 0.01, 0.005))]
    assert decide("outrider", batch, a_pass(KNEE)).verify_lens == [6, 0]


def test_without_calibration_the_drafters_mean_counts() -> None:
    batch = [decoding("known", (0.1, 0.01, 0.001)), decoding("unknown", (), num_drafted=8)]
    assert decide("outrider", batch, a_pass(KNEE)).verify_lens == [1, 5]
    assert decide("outrider", [], a_pass(KNEE)).verify_lens == []


def test_a_request_that_falls_behind_gets_the_rows() -> None:
    batch = [decoding("ahead", (0.6,) * 6), decoding("behind", (0.5,) * 6)]
    assert decide("outrider", batch, a_pass(KNEE)).verify_lens == [6, 0]
    weighted = replace(a_pass(KNEE), weights={"behind": 2.0})
    assert decide("outrider", batch, weighted).verify_lens == [0, 6]


def test_the_pass_stays_within_its_limit() -> None:
    batch = [decoding("a", (0.99,) * 20)]
    unlimited = a_pass(TableCost((1, 2, 30), (0.02, 0.021, 0.049)))
    assert decide("outrider", batch, unlimited).verify_lens == [20]
    assert decide("outrider", batch, replace(unlimited, limit_s=0.025)).verify_lens == [5]
    assert decide("outrider", batch, replace(unlimited, limit_s=0.001)).verify_lens == [0], "decoding goes on"


def test_within_a_limit_requests_that_are_ahead_give_up_their_rows() -> None:
    batch = [decoding("ahead", (0.8,) * 4), decoding("behind", (0.5,) * 4)]
    unlimited = a_pass(TableCost((1, 2, 30), (0.02, 0.021, 0.049)))
    assert decide("outrider", batch, unlimited).verify_lens == [4, 4]
    limited = replace(unlimited, limit_s=0.025)
    assert decide("outrider", batch, limited).verify_lens == [4, 0]
    assert decide("outrider", batch, replace(limited, weights={"behind": 2.0})).verify_lens == [0, 4]


def test_prompts_take_the_cheap_rows_from_unlikely_drafts() -> None:
    """32 rows take as long as one. Alone, even unlikely drafts are worth them; prompts that wait are worth more."""
    batch = [decoding("a", (0.9, 0.05, 0.045, 0.04, 0.035, 0.03, 0.025))]
    assert decide("outrider", batch, a_pass(FLAT_THEN_STEEP)).verify_lens == [7]
    rows = decide("outrider", batch, a_pass(FLAT_THEN_STEEP, num_prompt_tokens=60))
    assert rows.verify_lens == [1]
    assert rows.num_prompt_tokens == 30, "up to the cliff, not beyond"


def test_a_few_prompt_tokens_are_computed_at_any_price() -> None:
    cliff = TableCost((1, 2, 3), (0.02, 10.0, 20.0))
    rows = decide("outrider", [decoding("a", (0.9,))], replace(a_pass(cliff, num_prompt_tokens=40), limit_s=0.05))
    assert rows.num_prompt_tokens == 16
    assert rows.verify_lens == [0]


def test_prompts_alone_stay_within_the_limit() -> None:
    linear = TableCost((1, 64), (0.01, 0.64))
    assert decide("outrider", [], replace(a_pass(linear, num_prompt_tokens=60), limit_s=0.3)).num_prompt_tokens == 30
    assert decide("outrider", [], a_pass(linear, num_prompt_tokens=60)).num_prompt_tokens == 60
    attending = replace(a_pass(RowsAttend((1, 64), (0.01, 0.64)), num_prompt_tokens=60), limit_s=0.3)
    assert decide("outrider", [], replace(attending, num_prompt_context=1000)).num_prompt_tokens == 19


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_within_a_limit_prompt_tokens_take_the_time_of_what_they_attend_to(num_drafts: int) -> None:
    """1 ms a row, 10 ms for the first, and as much again for 2,000 tokens before those of the prompt."""
    batch = [decoding("a", (0.9,) * num_drafts)]
    cost = RowsAttend((1, 101), (0.01, 0.11))
    limited = replace(a_pass(cost, num_prompt_tokens=80), limit_s=0.0601)

    def of(num_context: int) -> tuple[int, int]:
        rows = decide("outrider", batch, replace(limited, num_prompt_context=num_context))
        return sum(rows.verify_lens), rows.num_prompt_tokens

    assert sum(of(0)) == 50
    num_verified, num_prompts = of(2000)
    assert num_verified + 2 * num_prompts in (40, 41)
    assert num_prompts >= 16


def test_rows_fill_the_prepared_shape_that_is_paid_for() -> None:
    linear = TableCost((1, 64), (0.02, 0.146))
    batch = [decoding("a", (0.6, 0.4, 0.1, 0.01, 0.005))]
    assert decide("outrider", batch, a_pass(linear)).verify_lens == [2]
    assert decide("outrider", batch, a_pass(padded(linear, (1, 2, 4, 8)))).verify_lens == [3]
    assert decide("outrider", batch, a_pass(padded(linear, (1, 6)))).verify_lens == [5]


def test_the_budget_falls_as_the_load_rises() -> None:
    """DSpark, figure 8: the rows for drafts of a request, from all at low load to none where each row costs its share."""
    knee = TableCost((1, 64, 512), (0.02, 0.022, 0.16))
    verified = []
    for num_ready in (1, 4, 8, 16, 32, 64, 128):
        batch = [decoding(str(i), (0.9, 0.75, 0.6, 0.4, 0.25, 0.1, 0.05)) for i in range(num_ready)]
        lens = decide("outrider", batch, a_pass(knee, max_pass_tokens=4096)).verify_lens
        verified.append(sum(lens) / num_ready)
    assert (verified[0], verified[-1]) == (7.0, 0.0)
    assert verified == sorted(verified, reverse=True)
    assert len(set(verified)) >= 4, "smoothly"
