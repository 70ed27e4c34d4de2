"""Verification policies of papers against cases worked by hand, and where the default does better."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.config import DraftLengthConfig
from router.cost_model import TableCost
from router.drafting.policies import VERIFICATION_POLICIES, build_draft_lengths
from router.drafting.value import DraftingValue
from router.plan import DrafterView, SequenceView
from router.planning.slo import RoundLimits
from tests.support.verification import DRAFTERS, Drawn, a_pass, decide, decoding, passes

# Throughput with the n likeliest of these tokens: 2/1, 2.9/1.1 = 2.64, 3.53/1.25 = 2.82, 4.03/1.6 = 2.52, 4.13/2 = 2.07
BATCH = [decoding("x", (0.9, 0.63)), decoding("y", (0.5, 0.1))]
SMOOTH = TableCost((2, 3, 4, 5, 6), (1.0, 1.1, 1.25, 1.6, 2.0))
# DSpark, appendix A: steps per second of 1, 0.5 and 0.45
CLIFF = TableCost((1, 2, 3), (1.0, 2.0, 1 / 0.45))


def lens(policy: str, batch: list[SequenceView], cost: TableCost, **limits: Any) -> tuple[int, ...]:
    rows = decide(policy, batch, replace(a_pass(cost, num_prompt_tokens=7), **limits) if limits else a_pass(cost))
    return tuple(rows.verify_lens)


def test_all_verifies_every_draft_that_has_room() -> None:
    assert lens("all", BATCH, SMOOTH) == (2, 2)
    rows = decide("all", BATCH, a_pass(SMOOTH, max_pass_tokens=5))
    assert rows.verify_lens == [2, 1]


def test_goodput_has_one_length_for_the_batch() -> None:
    """Lengths 0, 1 and 2: 2/1, 3.4/1.25 = 2.72, 4.13/2 = 2.07."""
    assert lens("goodput", BATCH, SMOOTH) == (1, 1)
    assert lens("goodput", BATCH, SMOOTH, limit_s=1.2) == (0, 0)
    assert decide("goodput", BATCH, a_pass(SMOOTH, max_pass_tokens=3)).verify_lens == [0, 0]


def test_adaspec_eliminates_until_the_throughput_falls() -> None:
    assert lens("adaspec", BATCH, SMOOTH) == (2, 0)


@pytest.mark.parametrize(("tpot_s", "expected"), [(1.7, (2, 0)), (1.2, (1, 0)), (1.05, (0, 0)), (0.5, (0, 0))])
def test_adaspec_eliminates_what_exceeds_the_slo(tpot_s: float, expected: tuple[int, int]) -> None:
    assert lens("adaspec", BATCH, SMOOTH, tpot_s=tpot_s) == expected


class ChainOfDrafts(TableCost):
    """A pass of 10 ms and 2 ms a row, after drafts of 3 ms a token."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float:  # type: ignore[override]
        return 0.003 * draft_len


ROUND = ChainOfDrafts((1, 101), (0.012, 0.212))
PROPOSALS = ((0.8, 0.6, 0.42, 0.3), (0.5, 0.3, 0.18, 0.1), (0.35, 0.2, 0.1, 0.05), (0.25, 0.12, 0.06, 0.03))


class BatchedDrafts(TableCost):
    """A pass of 10 ms and 2 ms a row, after drafts of 3 ms a token and request."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float:  # type: ignore[override]
        return 0.003 * draft_len * batch


BATCHED = BatchedDrafts((1, 101), (0.012, 0.212))


def test_adaspec_counts_the_time_of_drafting() -> None:
    """Equation 1. Without T_d the lengths are 3, 2, 1 and 1."""
    kept = [lens("adaspec", [decoding("x", survival)], ROUND)[0] for survival in PROPOSALS]
    assert kept == [4, 3, 2, 2]


def test_adaspec_verifies_nothing_where_no_round_meets_the_slo() -> None:
    """Drafts took 12 ms, a row takes 12."""
    assert lens("adaspec", [decoding("x", PROPOSALS[1])], ROUND, tpot_s=0.020) == (0,)
    assert lens("adaspec", [decoding("x", PROPOSALS[1])], ROUND, tpot_s=0.0281) == (2,)


@pytest.mark.parametrize(("tpot_s", "longest"), [(None, 8), (1.0, 8), (0.020, 1), (0.0221, 2), (0.016, 0)])
def test_adaspec_drafts_no_further_than_a_round_within_the_slo(tpot_s: float | None, longest: int) -> None:
    """A round of s draft tokens takes 12 + 5 s ms."""
    lengths = build_draft_lengths(DraftLengthConfig(kind="adaspec"), {"d": 8})
    batch = DraftingValue(BATCHED, DRAFTERS, limits=RoundLimits(tpot_s=tpot_s))
    assert lengths.budgets([decoding("x", ())], batch)["x"].num_tokens == longest


def test_adaspec_tries_on_a_drafter_whose_times_are_not_profiled() -> None:
    """A first draft that catches up takes long, and nothing but a next one tells that it is not usual."""
    lengths = build_draft_lengths(DraftLengthConfig(kind="adaspec"), {"d": 8})
    slow = {"d": DrafterView(reply_s=0.5, accepted_per_round=1.0, acceptance=0.6, draft_len=8.0)}
    value = DraftingValue(SMOOTH, slow, limits=RoundLimits(tpot_s=0.05))
    assert lengths.budgets([decoding("x", ())], value)["x"].num_tokens == 1


def test_adaspec_counts_the_drafting_of_the_requests_with_a_proposal() -> None:
    """Of two requests with a drafter one has a draft, made in 12 ms: n tokens of it take 26 + 2 n ms."""
    batch = [decoding("x", PROPOSALS[1]), decoding("y", ())]
    assert lens("adaspec", batch, BATCHED, tpot_s=0.0281) == (1, 0)


def test_adaspec_counts_the_longest_draft_of_a_drafter() -> None:
    """Four tokens for each of two requests in 24 ms: n tokens of them take 38 + 2 n ms."""
    batch = [decoding("x", PROPOSALS[0]), decoding("y", (0.3, 0.2))]
    assert lens("adaspec", batch, BATCHED, tpot_s=0.0401) == (1, 0)


def test_adaspec_counts_the_slower_of_two_drafters() -> None:
    """Four tokens in 12 ms, two of another drafter in 6: n tokens of them take 26 + 2 n ms."""
    batch = [decoding("x", PROPOSALS[0]), replace(decoding("y", (0.3, 0.2)), drafter="e")]
    assert lens("adaspec", batch, ROUND, tpot_s=0.0281) == (1, 0)


def test_adaspec_drafts_for_a_request_whose_prompt_is_under_way() -> None:
    """Beside one that decodes with another drafter: a pass of two rows in 14 ms, after a draft for one in 3."""
    prompt = replace(decoding("x", ()), computed_len=3)
    value = DraftingValue(BATCHED, DRAFTERS, limits=RoundLimits(tpot_s=0.0171))
    lengths = build_draft_lengths(DraftLengthConfig(kind="adaspec"), {"d": 8, "e": 8})
    assert lengths.budgets([prompt, replace(decoding("y", ()), drafter="e")], value)["x"].num_tokens == 1


@pytest.mark.parametrize(("tpot_s", "longest"), [(0.027, 0), (0.0281, 1)])
def test_adaspec_drafts_for_the_requests_of_a_drafter_together(tpot_s: float, longest: int) -> None:
    """A token for each: a pass of 6 rows in 22 ms, after drafts for the two requests with this drafter in 6."""
    batch = [decoding("x", ()), decoding("y", ()), replace(decoding("z", ()), drafter=None)]
    value = DraftingValue(BATCHED, DRAFTERS, limits=RoundLimits(tpot_s=tpot_s))
    lengths = build_draft_lengths(DraftLengthConfig(kind="adaspec"), {"d": 8})
    assert lengths.budgets(batch, value)["x"].num_tokens == longest


def test_adaspec_quotes_at_most_a_token_for_a_row() -> None:
    lengths = build_draft_lengths(DraftLengthConfig(kind="adaspec"), {"d": 8})
    steep = TableCost((1, 2), (0.01, 0.05))
    assert lengths.budgets([decoding("x", ())], DraftingValue(steep, DRAFTERS))["x"].row_price == 1.0


def test_dspark_admits_until_the_throughput_falls() -> None:
    assert lens("dspark", BATCH, SMOOTH) == (2, 0)
    assert lens("dspark", BATCH, SMOOTH, limit_s=1.2) == (1, 0)


def test_where_cost_is_smooth_they_agree() -> None:
    assert {lens(policy, BATCH, SMOOTH) for policy in ("adaspec", "dspark", "outrider")} == {(2, 0)}


def test_early_stopping_loses_behind_a_cliff() -> None:
    """Throughput 1, 0.9 and 1.134: the figures of DSpark's appendix A, case 1."""
    assert lens("dspark", [decoding("x", (0.8, 0.72))], CLIFF) == (0,)
    assert lens("outrider", [decoding("x", (0.8, 0.72))], CLIFF) == (2,)
    assert lens("outrider", [decoding("x", (0.8, 0.0))], CLIFF) == (0,)


def test_elimination_stops_at_a_cliff_too() -> None:
    """Throughput 1, 0.68 and 0.81: the first elimination loses, both together would win."""
    cliff = TableCost((1, 2, 3), (1.0, 1.9, 1.95))
    assert lens("adaspec", [decoding("x", (0.3, 0.28))], cliff) == (2,)
    assert lens("outrider", [decoding("x", (0.3, 0.28))], cliff) == (0,)


def test_asynchronous_dspark_takes_the_capacity_of_two_passes_ago() -> None:
    policy = VERIFICATION_POLICIES["dspark-async"]()
    good, bad = [decoding("x", (0.8, 0.72))], [decoding("x", (0.8, 0.0))]

    def length(batch: list[SequenceView], limit_s: float | None = None) -> int:
        return policy.rows(batch, replace(a_pass(CLIFF), limit_s=limit_s)).verify_lens[0]

    assert [length(good), length(bad)] == [0, 0], "algorithm 1, until two passes are known"
    assert [length(bad), length(good)] == [2, 0]
    assert [length(good), length(good)] == [0, 2]
    assert length(good, limit_s=1.5) == 0, "the limit is of this pass"


@pytest.mark.parametrize(("limit_s", "expected"), [(None, [0, 2]), (1.25, [0, 2]), (1.1, [0, 1]), (1.05, [0, 0])])
def test_asynchronous_dspark_gives_the_capacity_to_the_likeliest(limit_s: float | None, expected: list[int]) -> None:
    """Two tokens, in 1.25 s; one takes 1.1."""
    policy = VERIFICATION_POLICIES["dspark-async"]()
    for _ in range(2):
        policy.rows(BATCH, a_pass(SMOOTH))
    other = [decoding("x", (0.2, 0.1)), decoding("y", (0.9, 0.8))]
    assert policy.rows(other, replace(a_pass(SMOOTH), limit_s=limit_s)).verify_lens == expected
    assert policy.rows([decoding("x", ())], replace(a_pass(SMOOTH), limit_s=limit_s)).verify_lens == [0]


@pytest.mark.parametrize("policy", sorted(VERIFICATION_POLICIES))
def test_nothing_to_decode_is_nothing_to_verify(policy: str) -> None:
    rows = decide(policy, [], a_pass(SMOOTH, num_prompt_tokens=9))
    assert (rows.verify_lens, rows.num_prompt_tokens) == ([], 9)


@pytest.mark.parametrize("policy", sorted(VERIFICATION_POLICIES))
@settings(max_examples=30)
@given(drawn=passes(), scale=st.sampled_from((2.0**-10, 2.0**10)))
def test_a_machine_so_many_times_slower_is_served_alike(policy: str, drawn: Drawn, scale: float) -> None:
    before = drawn.context
    assume(isinstance(before.cost, TableCost))
    assert isinstance(before.cost, TableCost)
    limit_s = None if before.limit_s is None else scale * before.limit_s
    seconds = tuple(scale * one for one in before.cost.step_s_at)
    cost = TableCost(before.cost.rows, seconds, scale * before.cost.per_context_s)
    scaled = replace(before, cost=cost, limit_s=limit_s, tpot_s=limit_s)
    assert decide(policy, drawn.batch, scaled).verify_lens == decide(policy, drawn.batch, before).verify_lens


@given(passes())
def test_goodput_tries_each_length_for_the_whole_batch(drawn: Drawn) -> None:
    drawn = replace(drawn, context=replace(drawn.context, weights={}))
    candidates = []
    for length in range(max(len(one.survival) for one in drawn.batch) + 1):
        lens = [min(length, len(one.survival)) for one in drawn.batch]
        if length and not drawn.is_allowed(sum(lens)):
            break
        candidates.append((drawn.expected(lens) / drawn.seconds(sum(lens)), lens))
    best = max(rate for rate, _ in candidates)
    chosen = drawn.lens_of(decide("goodput", drawn.batch, drawn.context))
    assert drawn.expected(chosen) / drawn.seconds(sum(chosen)) == pytest.approx(best)


@given(passes())
def test_no_policy_of_a_paper_beats_the_default(drawn: Drawn) -> None:
    def rate(policy: str) -> float:
        chosen = drawn.lens_of(decide(policy, drawn.batch, drawn.context))
        assert policy == "all" or drawn.is_allowed(sum(chosen))
        return drawn.expected(chosen) / drawn.seconds(sum(chosen))

    best = rate("outrider")
    for policy in ("goodput", "adaspec", "dspark", "dspark-async"):
        assert rate(policy) <= best * (1 + 1e-9)
