"""Which requests a pass takes: of a barrier, of micro-batches, before frontiers, and by expected gain."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.types import DraftTerms
from router.cost_model import TableCost
from router.drafting.frontiers import HYSTERESIS, MARGIN, MAX_CHUNK_LEN, Frontiers, in_chunks
from router.drafting.overlap_gains import Pipeline, remote_bound
from router.drafting.policies import OVERLAP_POLICIES
from router.drafting.value import expected_tokens
from router.drafting.verification import PassContext
from router.plan import Capacity, DrafterView, Frontier, SequenceView
from router.planning.planner import PlannerSettings, StepPlanner

# A pass costs 20 ms and 1 ms for each row; drafts 5 ms for each request.
COST = TableCost((0, 1000), (0.02, 1.02))
PER_ROW = TableCost((0, 1000), (0.0, 1.0))
SLOW = DrafterView(0.041, 2.0, 0.8, draft_s=0.04, batch=8.0, request_s=0.005, draft_len=4.0, token_s=0.01)
MAX_HOLD_S = 1.0
CAPACITY = Capacity(16, 64, 64, 8, 64, 256)


def view(name: str, **changes: Any) -> SequenceView:
    one = SequenceView(name, 20, 19, 0, True, "d", None, 50)
    return replace(one, **changes)


def ready(name: str, committed_s: float = 0.0) -> SequenceView:
    return view(name, num_drafted=4, committed_s=committed_s)


def awaiting(name: str, since_s: float = 1.0) -> SequenceView:
    return view(name, awaiting_since_s=since_s, committed_s=since_s)


def start(policy: str, sequences: list[SequenceView], now_s: float = 1.01, drafter: DrafterView = SLOW) -> Any:
    return OVERLAP_POLICIES[policy](MAX_HOLD_S).start(sequences, PassContext({"d": drafter}, CAPACITY, COST, now_s))


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
    fast = OVERLAP_POLICIES["gain"](MAX_HOLD_S).start(batch, PassContext({"d": SLOW}, CAPACITY, PER_ROW, 1.01))
    assert len(fast.ready) < 8, "the rest is next"
    assert fast.num_micro_batches > 1


@pytest.mark.parametrize("acceptance", [0.1, 0.95])
def test_a_frontier_pays_where_guesses_come_true(acceptance: float) -> None:
    drafter = replace(SLOW, acceptance=acceptance, draft_s=0.03, batch=1.0, token_s=0.0075)
    found = start("gain", [ready("a")], drafter=drafter).frontiers
    assert bool(found) == (acceptance > 0.9)
    for frontier in found.values():
        assert 1 <= frontier.chunk_len < frontier.ahead_len
    always = start("frontier", [ready("a")], drafter=drafter).frontiers
    assert set(always) == {"d"}
    assert start("frontier", [ready("a")], drafter=replace(drafter, draft_s=0.0, token_s=0.0)).frontiers == {}, (
        "its times are not known"
    )


def test_a_plan_that_waits_keeps_the_frontiers() -> None:
    """Else budgets would change twice a round, and whole proposals be drafted meanwhile."""
    drafter = replace(SLOW, draft_s=0.03, batch=1.0, reply_s=0.01, token_s=0.0075)
    batch = [awaiting("a"), ready("b")]
    planner = StepPlanner(PlannerSettings(max_hold_s=MAX_HOLD_S, overlap="frontier"))
    begun = planner.plan(batch[1:], PassContext({"d": drafter}, CAPACITY, COST, 0.9))
    waiting = planner.plan(batch[:1], PassContext({"d": drafter}, CAPACITY, COST, 1.001))
    assert (bool(begun.spans), bool(waiting.spans)) == (True, False)
    assert set(begun.frontiers) == {"d"} == set(waiting.frontiers)


def chosen(frontiers: Frontiers, drafter: DrafterView, num_requests: int = 1, cost: TableCost = COST) -> Frontier | None:
    """Of the next choice."""
    pipeline = Pipeline([ready(str(i)) for i in range(num_requests)], {"d": drafter}, cost)
    for _ in range(8):
        found = frontiers.choose(pipeline).get("d")
    return found


FAST = replace(SLOW, acceptance=0.9, draft_s=0.02, batch=1.0, request_s=0.001, draft_len=4.0, token_s=0.005)


def test_the_rate_of_a_frontier_of_two_requests() -> None:
    """Chunks of 2 tokens for 2 requests: a pass takes 26 ms, a token of drafts for both 5.25 ms. Guesses are right with
    probability 0.729; else all wait for 2 tokens more for those that were wrong, 1.16 on average, so 2 at the most."""
    pipeline = Pipeline([ready("a"), ready("b")], {"d": FAST}, COST)
    assert pipeline.token_s("d", 2) == pytest.approx(0.00525)
    right, tokens = 0.729, 1.0 + 0.9 + 0.81
    round_s = right**2 * 0.026 + (1.0 - right**2) * (0.026 + 2 * 0.00525)
    assert pipeline.frontier_rate("d", 2) == pytest.approx(tokens / round_s)
    assert pipeline.barrier_rate("d", 2) == pytest.approx(tokens / (0.026 + 2 * 0.00525))


def test_a_round_with_a_wrong_guess_is_no_shorter_than_one_without() -> None:
    """The other requests still draft their bonus token and next chunk, for four times as long as one alone would."""
    slow = DrafterView(0.04, 2.0, 0.9, draft_s=0.04, batch=4.0, request_s=0.01, draft_len=4.0, token_s=0.01)
    pipeline = Pipeline([ready(str(i)) for i in range(4)], {"d": slow}, TableCost((1,), (0.005,)))
    assert pipeline.frontier_rate("d", 1) == pytest.approx(1.9 / 0.02)
    assert Frontiers().choose(pipeline) == {}


@pytest.mark.parametrize("num_requests", [1, 2, 4])
@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.6, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("token_s", [0.001, 0.006, 0.012, 0.03])
def test_a_frontier_is_chosen_where_it_is_faster_by_more_than_the_margin(
    num_requests: int, acceptance: float, token_s: float
) -> None:
    """Neither what is dismissed at once nor lengths that are not tried would be better by more than a trifle."""
    drafter = replace(FAST, acceptance=acceptance, draft_s=4 * token_s, request_s=0.0, token_s=token_s)
    pipeline = Pipeline([ready(str(i)) for i in range(num_requests)], {"d": drafter}, COST)
    lengths = range(1, MAX_CHUNK_LEN + 1)
    rate, awaited = (max(of("d", n) for n in lengths) for of in (pipeline.frontier_rate, pipeline.barrier_rate))
    found = Frontiers().choose(pipeline).get("d")
    if abs(rate * (1.0 - MARGIN) / awaited - 1.0) > 0.005:
        assert (found is not None) == (rate * (1.0 - MARGIN) > awaited)
    if found is not None:
        assert pipeline.frontier_rate("d", found.chunk_len) >= 0.995 * rate


def test_chunks_change_only_for_clearly_faster_ones() -> None:
    frontiers = Frontiers()
    first = chosen(frontiers, FAST)
    assert first is not None
    for acceptance in (0.86, 0.92, 0.88):
        assert chosen(frontiers, replace(FAST, acceptance=acceptance)) == first
    better = chosen(frontiers, replace(FAST, acceptance=0.99, draft_s=0.004, token_s=0.001))
    assert better is not None
    assert better.chunk_len > first.chunk_len
    assert chosen(frontiers, replace(FAST, acceptance=0.1)) is None


def test_it_takes_more_to_get_a_frontier_than_to_keep_it() -> None:
    def gain(acceptance: float) -> float:
        pipeline = Pipeline([ready("a")], {"d": replace(FAST, acceptance=acceptance)}, COST)
        lengths = range(1, MAX_CHUNK_LEN + 1)
        return max(pipeline.frontier_rate("d", n) for n in lengths) / max(pipeline.barrier_rate("d", n) for n in lengths)

    between = next(a / 100 for a in range(99, 1, -1) if gain(a / 100) < 1.0 / (1.0 - MARGIN) - 0.002)
    assert gain(between) > 1.0 / (1.0 - MARGIN + HYSTERESIS) + 0.002
    frontiers = Frontiers()
    assert chosen(frontiers, replace(FAST, acceptance=between)) is None
    frontiers = Frontiers()
    assert chosen(frontiers, FAST) is not None
    assert chosen(frontiers, replace(FAST, acceptance=between)) is not None


def test_a_frontier_for_a_few_is_not_kept_for_many() -> None:
    frontiers = Frontiers()
    assert chosen(frontiers, FAST) is not None
    many = Pipeline([ready(str(i)) for i in range(64)], {"d": replace(FAST, acceptance=0.1)}, COST)
    assert frontiers.choose(many) == {}
    assert chosen(frontiers, FAST) is not None
    frontiers.clear()
    assert frontiers.present == {}


def test_a_frontier_is_chosen_every_few_passes() -> None:
    frontiers, pipeline = Frontiers(), Pipeline([ready("a")], {"d": FAST}, COST)
    found = frontiers.choose(pipeline)
    worse = Pipeline([ready("a")], {"d": replace(FAST, acceptance=0.1)}, COST)
    assert [bool(frontiers.choose(worse)) for _ in range(9)] == [True] * 7 + [False] * 2
    assert found["d"].ahead_len == found["d"].chunk_len + 1


def test_a_frontier_pays_with_a_drafter_that_drafts_less_than_two_tokens_a_pass() -> None:
    """The pass after a good guess waits for the token under way instead of for a whole proposal."""
    token_s = 0.6 * COST.step_s(2, 20)
    found = chosen(Frontiers(), replace(FAST, draft_s=4 * token_s, request_s=0.0, token_s=token_s))
    assert found is not None
    assert found.chunk_len == 1


def test_budgets_are_cut_to_chunks() -> None:
    budgets = {"a": DraftTerms(7, 0.25), "b": DraftTerms(7, 0.25), "off": DraftTerms(0)}
    sequences = [view("a"), view("b", drafter="other"), view("off")]
    frontiers = {"d": Frontier(3)}
    found = in_chunks(budgets, frontiers, sequences)
    assert found == {"a": DraftTerms(3, 0.25, ahead_len=4), "b": budgets["b"], "off": DraftTerms(0)}
    assert in_chunks(budgets, frontiers, sequences)["a"] is found["a"]


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
