"""What service-level objectives change in a round, and what they leave alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost_model import TableCost
from router.drafting.verification import MIN_CHUNK_LEN, PassContext
from router.plan import Capacity, DrafterView, SequenceView, SloProgress, StepPlan
from router.planning.planner import PlannerSettings, StepPlanner
from router.planning.slo import BEST_EFFORT_TTFT_S, LATE_TOKENS, MAX_WEIGHT, RoundLimits, by_deadline, round_limits
from tests.support.verification import RowsAttend

COST = TableCost((1, 1001), (0.01, 1.01))  # 10 ms, and 1 ms for each further row
CAPACITY = Capacity(
    block_len=16, num_blocks=4096, num_free_blocks=4096, max_num_sequences=16, max_pass_tokens=2048, max_model_len=8192
)
NOW_S = 100.0
CONTEXT = PassContext({}, CAPACITY, COST, NOW_S)


def decoding(
    name: str = "d", tpot_s: float | None = None, num_tokens: int = 1, since_s: float = 0.0, **changes: Any
) -> SequenceView:
    """With ``num_tokens`` of output, the first of them ``since_s`` ago, beside LATE_TOKENS before them that were on time."""
    slo = None
    if tpot_s is not None:
        slo = SloProgress(None, tpot_s, NOW_S - since_s - LATE_TOKENS * tpot_s, num_tokens + LATE_TOKENS)
    view = SequenceView(name, 20 + num_tokens, 19 + num_tokens, 0, True, None, None, 100, arrived_s=NOW_S - since_s, slo=slo)
    return replace(view, **changes)


def prompt(
    name: str = "p", num_tokens: int = 100, due_s: float | None = None, age_s: float = 0.0, **changes: Any
) -> SequenceView:
    slo = None if due_s is None else SloProgress(NOW_S + due_s, None)
    return replace(SequenceView(name, num_tokens, 0, 0, False, None, None, 10, arrived_s=NOW_S - age_s, slo=slo), **changes)


def limits(decode: list[SequenceView], prompts: list[SequenceView] | None = None, num_draft_tokens: int = 0) -> RoundLimits:
    return round_limits(decode, prompts or [], COST, NOW_S, num_draft_tokens)


def plan(sequences: list[SequenceView], **settings: Any) -> StepPlan:
    return StepPlanner(PlannerSettings(**settings)).plan(sequences, CONTEXT)


def chunks(step: StepPlan) -> dict[str, int]:
    return {span.request_id: span.num_compute for span in step.spans}


def pass_s(step: StepPlan) -> float:
    return COST.step_s(sum(span.num_compute + span.num_drafts for span in step.spans), 0)


def test_a_pass_takes_at_most_the_tightest_objective_and_half_of_what_is_ahead_of_it() -> None:
    assert limits([decoding(), prompt()]) == RoundLimits()
    tightest = limits([decoding(tpot_s=0.05), decoding(tpot_s=0.2)])
    assert (tightest.limit_s, tightest.tpot_s) == (pytest.approx(0.05), 0.05)
    ahead = limits([decoding(tpot_s=0.05, num_tokens=5, since_s=0.12)])  # 80 ms ahead
    assert (ahead.limit_s, ahead.chunk_s) == (pytest.approx(0.05 + 0.04), pytest.approx(0.05 + 0.04 - 0.01))
    far_ahead = limits([decoding(tpot_s=0.05, num_tokens=1000, since_s=1.0)])
    assert far_ahead.limit_s == pytest.approx(0.05 + 0.5 * 16 * 0.05)
    assert not ahead.weights


def test_a_request_behind_leaves_prompts_less() -> None:
    found = limits([decoding(tpot_s=0.05, num_tokens=11, since_s=0.55)])  # 50 ms behind
    assert found.limit_s == pytest.approx(0.05)
    assert found.chunk_s == pytest.approx(0.05 - 0.025 - 0.01)
    far_behind = limits([decoding(tpot_s=0.05, num_tokens=11, since_s=5.0)])
    assert far_behind.chunk_s == 0.0


def test_a_request_weighs_as_much_as_it_must_be_faster_than_plain_decoding_to_be_on_time_in_16_tokens() -> None:
    def weight(tpot_s: float, behind_s: float) -> float:
        return limits([decoding(tpot_s=tpot_s, since_s=behind_s)]).weights.get("d", 1.0)

    assert weight(0.05, 0.5) == 1.0, "plain decoding makes up for it"
    assert weight(0.012, 0.0) == 1.0
    assert weight(0.012, 0.096) == pytest.approx(0.01 / 0.006)
    assert weight(0.008, 0.0) == pytest.approx(0.01 / 0.008), "plain decoding would miss it"
    assert weight(0.008, -0.064) == 1.0, "it is ahead"
    assert weight(0.012, 0.19) == weight(0.012, 0.3) == MAX_WEIGHT


def test_the_first_tokens_may_be_late_as_far_as_the_rest_of_them_regain_it() -> None:
    def new(**changes: Any) -> RoundLimits:
        return limits([decoding(slo=SloProgress(None, 0.02, NOW_S, 1), **changes)])

    assert new().chunk_s == pytest.approx(0.01 + 0.5 * 0.31)
    short = new(max_new_tokens=11)  # ten tokens come after the next one, and regain 10 ms each
    assert short.chunk_s == pytest.approx(0.01 + 0.5 * 0.1)
    late = limits([decoding(slo=SloProgress(None, 0.02, NOW_S - 0.02 * 21 - 0.1, 22))])
    assert late.chunk_s == pytest.approx(0.01), "what it can regain is used up"


def test_what_cannot_be_met_costs_others_nothing() -> None:
    faster_than_plain = limits([decoding(tpot_s=0.005)])
    assert (faster_than_plain.limit_s, faster_than_plain.chunk_s) == (None, math.inf)
    assert set(faster_than_plain.weights) == {"d"}  # drafts may still meet it
    missed = limits([decoding(tpot_s=0.05, num_tokens=11, since_s=60.0, max_new_tokens=100)])
    assert replace(missed, tpot_s=None) == RoundLimits()
    too_late = prompt(due_s=0.05)  # its 100 tokens take 99 ms
    assert limits([decoding()], [too_late]) == RoundLimits()


def test_passes_compute_what_due_prompts_need() -> None:
    due = prompt(num_tokens=101, due_s=0.5)  # its tokens take 100 ms, 300 are left
    assert limits([decoding()], [due]).num_due_tokens == 4  # in 30 passes
    assert limits([decoding()], [due], num_draft_tokens=90).num_due_tokens == 34, "in three with drafts"
    assert limits([decoding()], [due]).limit_s is None
    at_once = limits([decoding()], [due], num_draft_tokens=300)
    assert at_once.num_due_tokens == 101
    assert at_once.limit_s == pytest.approx(0.3 + 0.1)
    later = prompt("q", num_tokens=52, due_s=0.5)
    assert limits([decoding()], [due, later]).num_due_tokens == math.ceil(153 / 24), "the one before it comes first"


def test_algorithm_3_is_minus_one_beyond_the_tpot_of_the_batch() -> None:
    """AdaSpec: a pass may commit a single token, so it takes at most the tightest objective, ahead or not."""
    ahead = decoding(tpot_s=0.012, num_tokens=50, since_s=0.1, num_drafted=4, survival=(0.9,) * 4, drafter="d")
    assert [s.num_drafts for s in plan([ahead], verification="adaspec").spans] == [2]
    assert [s.num_drafts for s in plan([replace(ahead, slo=None)], verification="adaspec").spans] == [4]


@pytest.mark.parametrize("verification", ["outrider", "goodput"])
def test_drafts_fit_what_the_tightest_stream_leaves(verification: str) -> None:
    drafted = [decoding(str(i), num_drafted=8, survival=(0.95,) * 8, drafter="d") for i in range(4)]
    lax, tight = plan(drafted, verification=verification), decoding("t", tpot_s=0.03, num_tokens=2, since_s=0.03)
    assert sum(s.num_drafts for s in lax.spans) > 24
    assert pass_s(plan([*drafted, tight], verification=verification)) <= 0.03 + 1e-9


def test_chunks_are_sized_by_the_tightest_stream() -> None:
    long = prompt(num_tokens=2000)
    assert chunks(plan([decoding(), long])) == {"d": 1, "p": 256}
    step = plan([decoding(tpot_s=0.06), long])
    assert pass_s(step) == pytest.approx(0.06, abs=0.0011)
    assert chunks(step)["p"] in (49, 50)
    ahead = decoding(tpot_s=0.06, num_tokens=5, since_s=0.14)
    assert pass_s(plan([ahead, long])) == pytest.approx(0.06 + 0.05, abs=0.0011)
    hopeless = decoding(tpot_s=0.005)
    assert chunks(plan([hopeless, long])) == chunks(plan([decoding(), long]))


def test_a_prompt_of_best_effort_proceeds_whatever_streams_are_due() -> None:
    tight = decoding(tpot_s=0.0101)
    assert chunks(plan([tight, prompt(num_tokens=2000)])) == {"d": 1, "p": MIN_CHUNK_LEN}


def test_a_due_prompt_gets_larger_chunks_than_usual() -> None:
    due = prompt(num_tokens=600, due_s=0.8)
    assert chunks(plan([decoding(), due], max_chunk_len=64))["p"] == 150  # 41 ms are left, for four passes
    assert chunks(plan([decoding(), prompt(num_tokens=600, due_s=60.0)], max_chunk_len=64))["p"] == 64
    assert chunks(plan([decoding(), prompt(num_tokens=600)], max_chunk_len=64))["p"] == 64
    beside_tight = chunks(plan([decoding(tpot_s=0.05), due], max_chunk_len=64))["p"]
    assert beside_tight in (40, 41), "an objective of a stream comes first"


def test_drafts_give_way_to_what_is_due_of_a_prompt_that_attends_to_much() -> None:
    """1 ms a token, and as much again for 2,000 before it. A pass may take 80 ms, and plain decoding takes 12."""
    due = prompt(num_tokens=2600, due_s=1.6, computed_len=2000, running=True)
    batch = [decoding(str(i), tpot_s=0.08, num_drafted=10, survival=(0.95,) * 10, drafter="d") for i in range(3)]
    cost = RowsAttend((1, 1001), (0.01, 1.01))
    step = StepPlanner(PlannerSettings(max_chunk_len=64)).plan([*batch, due], replace(CONTEXT, cost=cost))
    assert sum(span.num_drafts for span in step.spans) == 0
    assert chunks(step)["p"] == 34


def test_prompts_are_computed_by_deadline_and_none_starves() -> None:
    early, late, free = prompt("early", due_s=1.0), prompt("late", due_s=5.0), prompt("free", age_s=4.0)
    old, missed = prompt("old", age_s=9.5), prompt("missed", due_s=-1.0, age_s=2.0)
    begun_again = prompt("again", slo=SloProgress(None, 0.1, NOW_S - 3.0, 7), age_s=5.0)
    order = by_deadline([free, missed, late, old, early, begun_again], NOW_S)
    assert [s.request_id for s in order] == ["again", "old", "early", "late", "free", "missed"]
    assert [s.request_id for s in by_deadline([free, replace(early, arrived_s=0.0, slo=None)], NOW_S)] == ["early", "free"]
    step = plan([decoding(), prompt("long", num_tokens=2000, running=True), early], max_chunk_len=128)
    assert list(chunks(step).items())[1:] == [("early", 100), ("long", 28)]


@given(st.lists(st.tuples(st.floats(0, 30), st.none() | st.floats(0.1, 60)), min_size=2, max_size=8))
def test_nobody_is_overtaken_by_requests_that_come_much_later(requests: list[tuple[float, float | None]]) -> None:
    views = [
        replace(prompt(str(i), age_s=age_s), slo=None if ttft_s is None else SloProgress(NOW_S - age_s + ttft_s, None))
        for i, (age_s, ttft_s) in enumerate(requests)
    ]
    patience_s = max([BEST_EFFORT_TTFT_S, *(ttft_s for _, ttft_s in requests if ttft_s is not None)])
    order = by_deadline(views, NOW_S)
    for i, first in enumerate(order):
        assert all(first.arrived_s <= later.arrived_s + patience_s + 1e-6 for later in order[i:])


@given(
    st.lists(st.tuples(st.integers(1, 600), st.booleans(), st.integers(0, 599), st.integers(0, 7)), min_size=1, max_size=12),
    st.integers(1, 300),
    st.integers(0, 120),
)
def test_objectives_that_never_bind_change_no_plan(
    shapes: list[tuple[int, bool, int, int]], chunk_len: int, num_free: int
) -> None:
    """Against plans of the same requests without objectives: the same spans, admissions and preemptions. They came within
    BEST_EFFORT_TTFT_S, so that none is overdue beside one that has begun."""
    at = [NOW_S - 20 + i / 2 for i in range(len(shapes))]
    sequences = [
        SequenceView(str(i), n, min(c, n - 1) if r else 0, d if c >= n - 1 and r else 0, r, "d", None, 50, arrived_s=at[i])
        for i, (n, r, c, d) in enumerate(shapes)
    ]
    lax = [replace(s, slo=SloProgress(None, 60.0, NOW_S, 1) if s.running else SloProgress(None, 60.0)) for s in sequences]
    context = PassContext({"d": DrafterView(0.0, 2.0, 0.8)}, replace(CAPACITY, num_free_blocks=num_free), COST, NOW_S)
    planner = StepPlanner(PlannerSettings(max_chunk_len=chunk_len))
    assert planner.plan(lax, context) == planner.plan(sequences, context)
