"""What the planner decides, and what it may never do."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cost_model import TableCost, monotone
from router.drafting.policies import VERIFICATION_POLICIES
from router.drafting.verification import PassContext
from router.estimates.drafter_stats import DrafterStats, Judgement
from router.plan import Capacity, DrafterView, SequenceView, SloProgress, StepPlan
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.verification import RowsAttend

FLAT = TableCost((1, 64), (0.02, 0.03))
STEEP = TableCost((1, 64), (0.02, 0.02 * 64))
CAPACITY = Capacity(
    block_len=4, num_blocks=100, num_free_blocks=100, max_num_sequences=16, max_pass_tokens=64, max_model_len=200
)
QUICK = DrafterView(reply_s=0.0005, accepted_per_round=2.0, acceptance=0.8)
DEAD = DrafterView(reply_s=5.0, accepted_per_round=2.0, acceptance=0.8)


def view(name: str = "a", **changes: Any) -> SequenceView:
    decoding = SequenceView(
        request_id=name,
        committed_len=20,
        computed_len=19,
        num_drafted=0,
        running=True,
        drafter="d",
        awaiting_since_s=None,
        max_new_tokens=50,
    )
    return replace(decoding, **changes)


def plan(
    sequences: list[SequenceView],
    drafter: DrafterView = QUICK,
    capacity: Capacity = CAPACITY,
    now_s: float = 1.0,
    cost: TableCost = FLAT,
    **settings_: Any,
) -> StepPlan:
    planner = StepPlanner(PlannerSettings(**settings_))
    return planner.plan(sequences, PassContext({"d": drafter}, capacity, cost, now_s))


def lengths_by(policy: str, batch: list[SequenceView], drafters: dict[str, DrafterView], cost: TableCost) -> dict[str, int]:
    rows = VERIFICATION_POLICIES[policy]().rows(batch, PassContext(drafters, CAPACITY, cost, now_s=1.0))
    return {one.request_id: length for one, length in zip(batch, rows.verify_lens, strict=True)}


def spans_of(step: StepPlan) -> dict[str, tuple[int, int]]:
    return {span.request_id: (span.num_compute, span.num_drafts) for span in step.spans}


def test_a_lone_request_waits_for_its_proposal_no_longer_than_it_is_worth() -> None:
    waiting = view(awaiting_since_s=1.0)
    step = plan([waiting], now_s=1.0)
    assert step.is_empty
    until_s = step.held["a"]
    assert step.wake_s == until_s
    assert until_s == pytest.approx(1.0 + 2.0 * 0.02, rel=0.1)  # two tokens of a 20 ms step
    assert spans_of(plan([waiting], now_s=until_s)) == {"a": (1, 0)}


def test_max_hold_bounds_every_wait() -> None:
    assert plan([view(awaiting_since_s=1.0)], max_hold_s=0.003).held["a"] == pytest.approx(1.003)
    assert plan([view(awaiting_since_s=1.0)], max_hold_s=0.0).held == {}


def test_nobody_waits_for_a_drafter_that_answers_too_late() -> None:
    assert spans_of(plan([view(awaiting_since_s=1.0)], DEAD)) == {"a": (1, 0)}


def test_the_batch_waits_together_only_while_that_is_cheaper_than_two_passes() -> None:
    batch = [view("a", awaiting_since_s=1.0), view("b", num_drafted=3)]
    assert plan(batch, replace(QUICK, reply_s=0.001)).is_empty
    assert plan(batch, replace(QUICK, reply_s=0.001)).wake_s == pytest.approx(1.002)  # looks again when it should be there
    apart = plan(batch, replace(QUICK, reply_s=0.025))
    assert set(spans_of(apart)) == {"b"}
    assert set(apart.held) == {"a"}
    late = plan(batch, replace(QUICK, reply_s=0.005), now_s=1.011)  # after twice its usual time
    assert set(spans_of(late)) == {"b"}


def test_passes_that_prompts_fill_do_not_wait_for_drafts() -> None:
    """Verified in the next pass, beside more of the prompts, the drafts cost no more. A last chunk waits."""
    batch = [view("a", awaiting_since_s=1.0), view("b", num_drafted=3)]
    for num_tokens, waits in ((150, False), (8, True)):
        prompt = view("p", committed_len=num_tokens, computed_len=0, drafter=None)
        step = plan([*batch, prompt], replace(QUICK, reply_s=0.01), max_chunk_len=16)
        assert step.is_empty == waits, num_tokens


def test_the_last_token_is_not_worth_a_wait_nor_a_draft() -> None:
    step = plan([view(awaiting_since_s=1.0, max_new_tokens=1), view("b", num_drafted=5, max_new_tokens=3)])
    assert spans_of(step)["a"] == (1, 0)
    assert spans_of(step)["b"][1] <= 2


def test_a_prompt_is_cut_into_chunks_beside_decodes_and_not_alone() -> None:
    prompt = view("p", committed_len=150, computed_len=0, drafter=None)
    assert spans_of(plan([prompt]))["p"] == (64, 0)
    beside = spans_of(plan([view("a"), prompt], max_chunk_len=16))
    assert beside == {"a": (1, 0), "p": (16, 0)}
    slow = replace(QUICK, reply_s=0.015)
    beside_held = plan([view("a", awaiting_since_s=1.0), prompt], slow, max_chunk_len=16)
    assert set(beside_held.held) == {"a"}
    assert spans_of(beside_held) == {"p": (16, 0)}


def test_a_slow_target_computes_a_prompt_in_chunks_that_take_a_bounded_time() -> None:
    slow = TableCost((1, 64), (0.1, 6.4))
    prompt = view("p", committed_len=150, computed_len=0, drafter=None)
    for others in ([], [view("a", drafter=None)]):
        step = plan([*others, prompt], cost=slow)
        assert spans_of(step)["p"] == (21, 0)


def test_what_is_left_of_a_proposal_is_verified_before_another_is_waited_for() -> None:
    assert spans_of(plan([view(awaiting_since_s=1.0, num_drafted=3)])) == {"a": (1, 3)}


def test_requests_are_admitted_in_order_while_whole_prompts_fit() -> None:
    capacity = replace(CAPACITY, num_free_blocks=10)
    waiting = [
        view(name, running=False, committed_len=length, computed_len=0)
        for i, (name, length) in enumerate([("a", 20), ("b", 24), ("c", 4)])
    ]
    step = plan(waiting, capacity=capacity)
    assert step.admitted == ("a",)  # b needs 6 of the 5 blocks left, and c may not overtake it


def test_a_pass_takes_as_many_waiting_requests_as_it_has_rows_for_what_is_not_cached() -> None:
    prompts = [view(f"p{i}", committed_len=40, computed_len=0, running=False) for i in range(5)]
    cached = [replace(one, cached_len=36) for one in prompts]
    decoding = [view("d0", drafter=None)]
    assert spans_of(plan([*decoding, *prompts], max_chunk_len=16)) == {"d0": (1, 0), "p0": (16, 0)}
    step = plan([*decoding, *cached], max_chunk_len=16)
    assert spans_of(step) == {"d0": (1, 0)} | {f"p{i}": (4, 0) for i in range(4)}
    assert step.admitted == ("p0", "p1", "p2", "p3")
    assert step.num_prompt_tokens_left == 4
    # Ten blocks each, though nine of them are cached: they may be the free ones.
    assert plan(cached, capacity=replace(CAPACITY, num_free_blocks=29)).admitted == ("p0", "p1")


def test_the_places_of_a_pass_are_for_the_prompts_that_are_due_first() -> None:
    def prompt(name: str, due_s: float, cached_len: int) -> SequenceView:
        slo = SloProgress(due_s, None)
        return view(name, committed_len=40, computed_len=0, cached_len=cached_len, running=False, slo=slo)

    prompts = [prompt("late", 60.0, 36), prompt("early", 50.0, 0)]
    step = plan(prompts, capacity=replace(CAPACITY, max_num_sequences=1))
    assert spans_of(step) == {"early": (40, 0)}, "not as many tokens as the late one has left"


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    full = replace(CAPACITY, num_free_blocks=0)
    old = view("old", committed_len=21, computed_len=20)
    young = view("young", committed_len=21, computed_len=20)
    step = plan([old, young], capacity=full)
    assert step.preempted == ("young",)
    assert spans_of(step) == {"old": (1, 0)}


def test_drafts_give_way_before_sequences_do() -> None:
    tight = replace(CAPACITY, num_free_blocks=2)
    batch = [
        view("a", committed_len=21, computed_len=20, num_drafted=8),
        view("b", committed_len=21, computed_len=20, num_drafted=8),
    ]
    step = plan(batch, capacity=tight, verification="all")
    assert step.preempted == ()
    assert spans_of(step) == {"a": (1, 3), "b": (1, 3)}


def test_half_computed_prompts_that_hold_all_blocks_do_not_deadlock() -> None:
    full = replace(CAPACITY, num_free_blocks=0)
    batch = [view(n, committed_len=40, computed_len=20) for n in "ab"]
    assert plan(batch, capacity=full).preempted == ("b",)


def test_outrider_verifies_all_where_rows_are_cheap_and_nothing_where_they_are_dear() -> None:
    batch = [view(str(i), num_drafted=7) for i in range(4)]
    drafters = {"d": QUICK}
    assert set(lengths_by("outrider", batch, drafters, FLAT).values()) == {7}
    assert set(lengths_by("outrider", batch, drafters, STEEP).values()) == {0}
    assert set(lengths_by("all", batch, drafters, STEEP).values()) == {7}


def test_the_best_draft_token_without_a_row_is_told() -> None:
    """Four rows before the knee: for the first token of each, not for the second."""
    knee = TableCost((1, 8, 9, 64), (0.02, 0.02, 0.04, 0.4))
    batch = [view(str(i), num_drafted=2, survival=(0.9 - 0.1 * i, 0.5 - 0.1 * i)) for i in range(4)]
    step = plan(batch, cost=knee)
    assert {span.num_drafts for span in step.spans} == {1}
    assert step.best_left_out == 0.5
    assert plan(batch[:2], cost=knee).best_left_out == 0.0, "all are verified"


def test_a_chunk_is_as_long_whatever_decoding_attends_to() -> None:
    """128 rows take 1.3 s, below the limit; with the 40,000 tokens that others attend to they would be charged 27 s."""
    cost = RowsAttend((1, 128), (0.02, 1.3))
    capacity = replace(CAPACITY, num_blocks=20_000, num_free_blocks=10_000, max_pass_tokens=256, max_model_len=20_000)
    prompt = view("prompt", committed_len=1000, computed_len=500, drafter=None)
    chunks = []
    for committed_len in (20, 10_000):
        batch = [view(str(i), committed_len=committed_len, computed_len=committed_len - 1, drafter=None) for i in range(4)]
        step = plan([*batch, prompt], capacity=capacity, cost=cost, max_chunk_len=128)
        chunks.append(spans_of(step)["prompt"])
    assert chunks[0] == chunks[1]
    assert chunks[0][0] > 64


def test_an_urgent_prompt_does_not_pay_for_what_another_has_computed() -> None:
    cost = RowsAttend((1, 256), (0.02, 1.0))
    capacity = replace(CAPACITY, num_blocks=20_000, num_free_blocks=10_000, max_pass_tokens=512, max_model_len=40_000)
    urgent = view("urgent", committed_len=257, computed_len=0, running=False, drafter=None, slo=SloProgress(3.0, None))
    chunks = []
    for computed_len in (100, 30_000):
        begun = view("begun", committed_len=computed_len + 900, computed_len=computed_len, drafter=None)
        step = plan([view("a", drafter=None), begun, urgent], capacity=capacity, cost=cost)
        chunks.append(spans_of(step)["urgent"])
    assert chunks[0] == chunks[1]
    assert chunks[0][0] > 200


def test_outrider_spends_rows_on_the_drafter_that_is_right() -> None:
    knee = TableCost((1, 8, 16), (0.02, 0.02, 0.08))
    batch = [view("good", num_drafted=7, drafter="good"), view("bad", num_drafted=7, drafter="bad")]
    drafters = {"good": replace(QUICK, acceptance=0.95), "bad": replace(QUICK, acceptance=0.3)}
    lengths = lengths_by("outrider", batch, drafters, knee)
    assert lengths["good"] > lengths["bad"]


def test_a_monotone_table_never_falls_and_goes_on_beyond_its_ends() -> None:
    table = monotone([(8, 0.03), (1, 0.02), (4, 0.04)])
    assert [table.step_s(n, 0) for n in (1, 4, 8)] == [0.02, 0.04, 0.04]
    assert TableCost((1, 2), (1.0, 2.0)).step_s(4, 0) == 4.0


sequences = st.lists(
    st.builds(
        lambda i, prompt, done, drafted, running, waits: view(
            str(i),
            committed_len=prompt,
            computed_len=min(done, prompt - 1) if running else 0,
            num_drafted=drafted,
            running=running,
            awaiting_since_s=1.0 if waits and not drafted else None,
        ),
        st.integers(0, 10**6),
        st.integers(1, 60),
        st.integers(0, 60),
        st.integers(0, 9),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda s: s.request_id,
)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(sequences, st.integers(0, 60), st.integers(12, 64), st.sampled_from(sorted(VERIFICATION_POLICIES)))
def test_no_plan_asks_for_more_than_there_is(
    batch: list[SequenceView], num_free: int, max_pass_tokens: int, verification: str
) -> None:
    batch.sort(key=lambda s: int(s.request_id))
    capacity = replace(CAPACITY, num_free_blocks=num_free, max_pass_tokens=max_pass_tokens, max_num_sequences=12)
    step = plan(batch, capacity=capacity, verification=verification)
    by_id = {s.request_id: s for s in batch}
    spans = [(by_id[span.request_id], span) for span in step.spans]
    assert len({span.request_id for span in step.spans}) == len(step.spans)
    assert not {span.request_id for span in step.spans} & (set(step.preempted) | set(step.held))
    assert sum(span.num_compute + span.num_drafts for span in step.spans) <= max_pass_tokens

    def blocks(length: int) -> int:
        return -(-length // capacity.block_len)

    freed = sum(blocks(by_id[name].computed_len) for name in step.preempted)
    needed = sum(blocks(s.computed_len + span.num_compute + span.num_drafts) - blocks(s.computed_len) for s, span in spans)
    num_running = sum(s.running for s in batch)
    if num_running != 1 or num_free > 0:  # a lone sequence without a block is refused when it is submitted
        assert needed <= num_free + freed
    for s, span in spans:
        assert 1 <= span.num_compute <= s.committed_len - s.computed_len
        assert span.num_drafts <= s.num_drafted
        assert span.num_drafts == 0 or span.num_compute == s.committed_len - s.computed_len
        assert s.running or s.request_id in step.admitted
    if any(s.running for s in batch) and num_running > 1:
        assert step.spans or step.preempted or step.held, "a plan that does nothing while there is work"


def test_a_drafter_that_had_bad_luck_is_found_again() -> None:
    """Draft tokens that were not verified are judged by the bonus token: else no proposal would ever be verified again."""
    stats = DrafterStats()
    dear_rows = TableCost((1, 2), (0.02, 0.026))

    def length() -> int:
        batch = [view(num_drafted=4)]
        return lengths_by("outrider", batch, {"d": stats.view}, dear_rows)["a"]

    for _ in range(200):
        stats.judged(Judgement("d", (0.9,), 0), num_verified=length())
    assert length() == 0
    for _ in range(200):
        stats.judged(Judgement("d", (0.9,), 1), num_verified=0)
    assert length() > 0
