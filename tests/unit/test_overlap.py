"""Which requests a pass takes: of a barrier, of micro-batches, before frontiers, and by expected gain."""

from dataclasses import replace
from typing import Any

import pytest

from router.cost_model import TableCost
from router.overlap import OVERLAP_POLICIES
from router.overlap.chunks import Chunks
from router.overlap.gains import FRONTIER_MARGIN, MAX_CHUNK_LEN, Pipeline, expected_tokens, remote_bound
from router.plan import Capacity, DraftBudget, DrafterView, Frontier, SequenceView
from router.planner import PlannerSettings, StepPlanner

# A pass costs 20 ms and 1 ms for each row; drafts 5 ms for each request.
COST = TableCost((0, 1000), (0.02, 1.02))
PER_ROW = TableCost((0, 1000), (0.0, 1.0))
SLOW = DrafterView(0.041, 2.0, 0.8, draft_s=0.04, batch=8.0, request_s=0.005, draft_len=4.0)
MAX_HOLD_S = 1.0


def view(name: str, **changes: Any) -> SequenceView:
    one = SequenceView(name, 20, 19, 0, True, "d", None, 50)
    return replace(one, **changes)


def ready(name: str, committed_s: float = 0.0) -> SequenceView:
    return view(name, num_drafted=4, committed_s=committed_s)


def awaiting(name: str, since_s: float = 1.0) -> SequenceView:
    return view(name, awaiting_since_s=since_s, committed_s=since_s)


def start(policy: str, sequences: list[SequenceView], now_s: float = 1.01, drafter: DrafterView = SLOW) -> Any:
    return OVERLAP_POLICIES[policy](MAX_HOLD_S).start(sequences, {"d": drafter}, COST, now_s)


def names(sequences: Any) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def test_a_barrier_waits_for_every_proposal_but_not_for_ever() -> None:
    batch = [ready("a"), awaiting("b"), view("plain", drafter=None)]
    waiting = start("barrier", batch)
    assert (names(waiting.ready), dict(waiting.held), waiting.wake_s) == ([], {"b": 2.0}, 2.0)
    assert names(start("barrier", [ready("a"), ready("b"), batch[2]]).ready) == ["a", "b", "plain"]
    late = start("barrier", batch, now_s=2.0)  # the drafter is dead: the request is decoded plainly
    assert (names(late.ready), late.held, late.wake_s) == (["a", "b", "plain"], {}, None)


def test_micro_batches_take_turns() -> None:
    """The first pass takes half of a batch that is in phase; from then on one half is drafted for."""
    batch = [ready(name) for name in "abcd"]
    drafter = replace(SLOW, batch=4.0, draft_s=0.02)
    assert names(start("micro-batch", batch, drafter=drafter).ready) == ["a", "b"]
    batch[:2] = [awaiting("a"), awaiting("b")]
    second = start("micro-batch", batch, drafter=drafter)
    assert (names(second.ready), set(second.held)) == (["c", "d"], {"a", "b"})
    batch = [ready("a", 1.0), awaiting("b"), awaiting("c", 1.03), awaiting("d", 1.03)]
    assert start("micro-batch", batch, 1.03, drafter).wake_s == 2.0  # one of two has come
    batch[1] = ready("b", 1.0)
    assert names(start("micro-batch", batch, 1.03, drafter).ready) == ["a", "b"]


def test_the_oldest_commits_come_first_and_requests_without_drafts_take_part_in_every_pass() -> None:
    batch = [ready("a", 3.0), ready("b", 1.0), view("plain", drafter=None), ready("c", 2.0), ready("d", 4.0)]
    assert set(names(start("micro-batch", batch).ready)) == {"b", "c", "plain"}


def test_a_dead_drafter_leaves_one_pass_for_all() -> None:
    batch = [awaiting(name) for name in "abcd"]
    assert names(start("micro-batch", batch, now_s=2.0).ready) == list("abcd")


def test_as_many_micro_batches_as_decode_fastest() -> None:
    """A pass costs 1 ms a row, drafts of 4 tokens for 8 requests 40 ms. A barrier is best with drafts of 1 token: 14.4
    tokens in 27 ms. Two micro-batches take 16 ms for as much. Where passes cost as much for few rows as for many, none are
    worth it."""
    batch = [ready(str(i)) for i in range(8)]
    assert Pipeline(batch, {"d": SLOW}, PER_ROW).round_s(1, 1) == pytest.approx(0.027)
    assert Pipeline(batch, {"d": SLOW}, PER_ROW).round_s(2, 1) == pytest.approx(0.016)
    assert Pipeline(batch, {"d": SLOW}, PER_ROW).num_micro_batches() == 2
    flat = TableCost((1,), (0.06,))
    assert Pipeline(batch, {"d": SLOW}, flat).num_micro_batches() == 1
    assert Pipeline(batch, {"d": SLOW}, flat).num_micro_batches(least=2) == 2
    assert Pipeline(batch, {"d": replace(SLOW, shares_device=True)}, PER_ROW).num_micro_batches() == 1
    assert Pipeline(batch, {}, PER_ROW).num_micro_batches() == 1, "nothing is known of the drafter"


def test_a_barrier_with_shorter_drafts_is_compared_with_micro_batches() -> None:
    """With drafts of 4 tokens, as at present, two micro-batches would take 80 ms instead of 101 ms."""
    batch = [ready(str(i)) for i in range(8)]
    pipeline = Pipeline(batch, {"d": SLOW}, COST)
    assert pipeline.round_s(1) == pytest.approx(0.101)
    assert pipeline.round_s(2) == pytest.approx(0.08)
    assert pipeline.num_micro_batches() == 1


def test_the_default_is_the_rule_by_gain_unless_overlap_pays() -> None:
    batch = [ready(str(i)) for i in range(4)] + [awaiting(str(i)) for i in range(4, 8)]
    assert len(start("gain", batch).ready) == 4
    shared = start("gain", [ready("a"), awaiting("b")], drafter=replace(SLOW, reply_s=0.001, shares_device=True))
    assert shared.wake_s is not None or names(shared.ready) == ["a"]
    batch = [ready(str(i)) for i in range(8)]
    fast = OVERLAP_POLICIES["gain"](MAX_HOLD_S).start(batch, {"d": SLOW}, PER_ROW, 1.01)
    assert len(fast.ready) < 8, "the rest is next"
    assert fast.num_micro_batches > 1


@pytest.mark.parametrize("acceptance", [0.1, 0.95])
def test_a_frontier_pays_where_guesses_come_true(acceptance: float) -> None:
    drafter = replace(SLOW, acceptance=acceptance, draft_s=0.03, batch=1.0, draft_len=4.0)
    found = start("gain", [ready("a")], drafter=drafter).frontiers
    assert bool(found) == (acceptance > 0.9)
    for frontier in found.values():
        assert 1 <= frontier.chunk_len < frontier.ahead_len
    always = start("frontier", [ready("a")], drafter=drafter).frontiers
    assert set(always) == {"d"}
    assert start("frontier", [ready("a")], drafter=replace(drafter, draft_s=0.0)).frontiers == {}, "its times are not known"


def test_a_plan_that_waits_keeps_the_frontiers() -> None:
    """Else budgets would change twice a round, and whole proposals be drafted meanwhile."""
    drafter = replace(SLOW, draft_s=0.03, batch=1.0, reply_s=0.01)
    batch = [awaiting("a"), ready("b")]
    capacity = Capacity(16, 64, 64, 8, 64, 256)
    planner = StepPlanner(PlannerSettings(max_hold_s=MAX_HOLD_S, overlap="frontier"))
    waiting = planner.plan(batch[:1], {"d": drafter}, capacity, COST, 1.001)
    assert not waiting.spans
    assert set(waiting.frontiers) == {"d"} == set(planner.plan(batch, {"d": drafter}, capacity, COST, 2.0).frontiers)


@pytest.mark.parametrize("num_requests", [1, 2, 4])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("token_s", [0.001, 0.006, 0.012, 0.03])
def test_a_frontier_that_is_dismissed_at_once_would_not_pay(num_requests: int, acceptance: float, token_s: float) -> None:
    """The bound on what overlap saves dismisses none that the search would choose."""
    drafter = replace(SLOW, acceptance=acceptance, draft_s=4 * token_s, batch=1.0, request_s=0.0, draft_len=4.0)
    batch = [ready(str(i)) for i in range(num_requests)]
    found = Pipeline(batch, {"d": drafter}, COST).frontier("d")
    barrier_rate = rate = 0.0
    for length in range(1, MAX_CHUNK_LEN + 1):
        pass_s = COST.step_s(num_requests * (1 + length), 20 * num_requests)
        barrier_rate = max(barrier_rate, expected_tokens(acceptance, length) / (pass_s + length * token_s))
        next_len = min(length, max(1, int(pass_s / token_s) - 1))
        hit, next_hit = (acceptance ** ((n + 1) * num_requests) for n in (length, next_len))
        share = hit / (1.0 - next_hit + hit)
        tokens = share * expected_tokens(acceptance, next_len) + (1.0 - share) * expected_tokens(acceptance, length)
        hit_s, miss_s = max(pass_s, (next_len + 1) * token_s), pass_s + (length + 0.5) * token_s
        rate = max(rate, tokens / (share * hit_s + (1.0 - share) * miss_s))
    assert (found is not None) == (rate * (1.0 - FRONTIER_MARGIN) > barrier_rate)


def test_a_frontier_pays_with_a_drafter_that_drafts_less_than_two_tokens_a_pass() -> None:
    """The pass after a good guess waits for the token under way instead of for a whole proposal."""
    pass_s = COST.step_s(2, 20)
    drafter = replace(SLOW, acceptance=0.9, draft_s=4 * 0.6 * pass_s, batch=1.0, request_s=0.0, draft_len=4.0)
    found = Pipeline([ready("a")], {"d": drafter}, COST).frontier("d")
    assert found is not None
    assert found.chunk_len == 1


def test_budgets_are_cut_to_chunks() -> None:
    budgets = {"a": DraftBudget(7, 0.25), "b": DraftBudget(7, 0.25), "off": DraftBudget(0)}
    sequences = [view("a"), view("b", drafter="other"), view("off")]
    chunks, frontiers = Chunks(), {"d": Frontier(3, 8)}
    found = chunks.limited(budgets, frontiers, sequences)
    assert found == {"a": DraftBudget(3, 0.25, ahead_len=8), "b": budgets["b"], "off": DraftBudget(0)}
    assert chunks.limited(budgets, frontiers, sequences)["a"] is found["a"]


def test_bounds() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(1.0, 4) == 5.0
    assert remote_bound(4, 0.005, 0.02) == pytest.approx(2.0)


class Profiled(TableCost):
    """Drafts of a model that reads its weights: one request more takes next to nothing."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> Any:
        return 0.01 * draft_len


def test_batches_that_were_not_seen_take_what_the_profile_says() -> None:
    """By measurements alone half a batch would take half the time, and two micro-batches would pay."""
    batch, slower = [ready(f"r{i}") for i in range(8)], replace(SLOW, draft_s=0.16, reply_s=0.16, request_s=0.02)
    assert Pipeline(batch, {"d": slower}, PER_ROW).num_micro_batches() > 1
    assert Pipeline(batch, {"d": slower}, Profiled(PER_ROW.rows, PER_ROW.step_s_at)).num_micro_batches() == 1
