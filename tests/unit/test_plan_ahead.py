"""The plan of the next pass is made beside the present one, and corrected by what that committed."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from router.cost_model import TableCost
from router.drafting.policies import VERIFICATION_POLICIES
from router.drafting.ranking import DraftsAtHand, Ranking
from router.drafting.verification import PassContext, useful_len
from router.plan import Capacity, DrafterView, SequenceView, SloProgress, Span, StepPlan
from router.planning.ahead import FEWEST, PlanAhead
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.simulated_cluster import SimulatedCluster, random_requests
from tests.support.simulated_network import Faults
from tests.support.toys import plain_run

NUM = 2 * FEWEST
KNEE = TableCost((1, NUM + 40, NUM + 41, 512), (0.02, 0.02, 0.05, 0.1))  # 40 draft tokens are free
DRAFTERS = {"d": DrafterView(0.001, 2.0, 0.7)}
CAPACITY = Capacity(16, 1000, 500, 64, 512, 4096)
CONTEXT = PassContext(DRAFTERS, CAPACITY, KNEE, now_s=0.0)


class Counting(StepPlanner):
    """``made``: what was planned, by the context of the requests."""

    def __init__(self, verification: str = "outrider") -> None:
        super().__init__(PlannerSettings(verification, overlap="barrier"))
        self.made: list[int] = []

    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        self.made.append(sum(s.committed_len for s in sequences))
        return super().plan(sequences, context)


def view(i: int, length: int, survival: Sequence[float] = (0.9, 0.8, 0.7), left: int = 50) -> SequenceView:
    return SequenceView(f"r{i}", length, length - 1, len(survival), True, "d", None, left, tuple(survival))


def at_hand(sequences: Sequence[SequenceView]) -> DraftsAtHand | None:
    """As `engine.sequences.Sequences.drafts_at_hand`."""
    if any(not s.running or s.num_left != 1 or s.awaiting_since_s is not None for s in sequences):
        return None
    lens = [useful_len(s, CAPACITY) for s in sequences]
    rows = [[*s.survival[:num], *[-1.0] * (8 - num)] for s, num in zip(sequences, lens, strict=True)]
    return DraftsAtHand([s.request_id for s in sequences], lens, np.array(rows))


def planned(
    ahead: PlanAhead, sequences: Sequence[SequenceView], capacity: Capacity = CAPACITY, context: PassContext = CONTEXT
) -> StepPlan:
    drafts = at_hand(sequences)
    corrected = None if drafts is None else ahead.correct(drafts, capacity)
    return corrected or ahead.plan(sequences, replace(context, capacity=capacity))


def expecting() -> tuple[PlanAhead, Counting]:
    """While a pass over ``NUM`` requests is computed."""
    planner = Counting()
    ahead = PlanAhead(planner)
    before = [view(i, 100) for i in range(NUM)]
    ahead.expect(planned(ahead, before), before, CONTEXT)
    assert len(planner.made) == 2
    assert planner.made[1] > planner.made[0] + NUM, "lengths are those that are expected after the pass"
    planner.made.clear()
    return ahead, planner


def test_only_lengths_and_drafts_are_corrected_after_a_pass() -> None:
    """The likeliest drafts at hand are verified, as many as were planned."""
    ahead, planner = expecting()
    after = [view(i, 102 + i % 3, (0.95, 0.9, 0.85) if i < 10 else (0.4, 0.3, 0.2)) for i in range(NUM)]
    plan = planned(ahead, after)
    assert not planner.made
    assert [span.num_compute for span in plan.spans] == [1] * NUM
    assert sum(span.num_drafts for span in plan.spans) == 40, "up to the knee"
    assert [span.num_drafts for span in plan.spans[:10]] == [3] * 10
    assert plan.best_left_out == pytest.approx(0.4)
    planned(ahead, after)
    assert planner.made, "an expected plan is used once"


def test_who_ended_is_left_out_and_no_draft_goes_beyond_an_end() -> None:
    ahead, planner = expecting()
    after = [view(i, 102, left=1 if i == 3 else 50) for i in range(NUM // 2)]
    plan = planned(ahead, after)
    assert not planner.made
    assert [span.request_id for span in plan.spans] == [f"r{i}" for i in range(NUM // 2)]
    assert sum(span.num_drafts for span in plan.spans) == 20
    assert plan.spans[3] == Span("r3", 1, 0)


def test_a_prompt_of_which_all_but_one_token_was_cached_decodes_after_the_pass() -> None:
    planner = Counting()
    ahead = PlanAhead(planner)
    cached = replace(view(NUM, 33, ()), running=False, computed_len=0, cached_len=32)
    before = [*(view(i, 100) for i in range(NUM)), cached]
    plan = planned(ahead, before)
    assert plan.admitted == (cached.request_id,)
    ahead.expect(plan, before, CONTEXT)
    planner.made.clear()
    assert len(planned(ahead, [view(i, 102) for i in range(NUM + 1)]).spans) == NUM + 1
    assert not planner.made


@pytest.mark.parametrize("change", ["arrived", "awaits", "prompt", "preempted", "few drafts", "many drafts", "no blocks"])
def test_what_changes_more_is_planned_anew(change: str) -> None:
    ahead, planner = expecting()
    after = [view(i, 102) for i in range(NUM)]
    first, capacity = after[0], CAPACITY
    if change == "arrived":
        after.append(replace(view(NUM, 10), running=False, computed_len=0))
    elif change == "awaits":
        after[0] = replace(first, num_drafted=0, survival=(), awaiting_since_s=0.0)
    elif change == "prompt":
        after[0] = replace(first, computed_len=50)
    elif change == "preempted":
        after[0] = replace(first, computed_len=0, running=False)
    elif change == "few drafts":
        after = [view(i, 102, (0.9,)) for i in range(NUM)]
    elif change == "many drafts":
        after = [view(i, 102, (0.9,) * 7) for i in range(NUM)]
    else:
        capacity = replace(CAPACITY, num_free_blocks=NUM + 1)
    planned(ahead, after, capacity)
    assert planner.made == [sum(s.committed_len for s in after)]


def test_a_wait_for_proposals_keeps_what_is_expected() -> None:
    ahead, planner = expecting()
    waiting = [replace(view(i, 102), num_drafted=0, survival=(), awaiting_since_s=0.0) for i in range(NUM)]
    held = planned(ahead, waiting)
    assert held.is_empty
    assert held.held
    ahead.expect(held, waiting, CONTEXT)
    planner.made.clear()
    assert len(planned(ahead, [view(i, 102) for i in range(NUM)]).spans) == NUM
    assert not planner.made


@pytest.mark.parametrize("verification", sorted(VERIFICATION_POLICIES.keys() - {"outrider"}))
def test_other_policies_choose_from_the_drafts_at_hand(verification: str) -> None:
    before, after = [view(i, 100) for i in range(NUM)], [view(i, 102, (0.9,) * 5) for i in range(NUM)]
    ahead, alone = PlanAhead(Counting(verification)), Counting(verification)
    ahead.expect(planned(ahead, before), before, CONTEXT)
    alone.plan(before, CONTEXT)
    assert planned(ahead, after) == alone.plan(after, CONTEXT)


@pytest.mark.parametrize("levels", [3, 1000])
def test_the_likeliest_drafts_are_those_of_a_ranking(levels: int) -> None:
    """Of proposals of any length, also where many are equally likely."""
    rng = random.Random(levels)
    for _ in range(50):
        views = []
        for i in range(rng.randrange(1, 20)):
            survival = sorted((rng.randrange(1, levels) / levels for _ in range(rng.randrange(8))), reverse=True)
            views.append(view(i, 100, survival, left=rng.choice((2, 5, 50))))
        drafts, ranking = at_hand(views), Ranking(views, CONTEXT)
        assert drafts is not None
        for num in range(ranking.num_tokens + 1):
            lens, next_one = drafts.likeliest(num)
            assert lens == ranking.lens(num)
            rest = [s for one, taken, all_ in zip(views, lens, drafts.lens, strict=True) for s in one.survival[taken:all_]]
            assert next_one == max(rest, default=0.0)


def test_few_requests_and_objectives_are_planned_after_the_pass() -> None:
    for before in (
        [view(i, 100) for i in range(FEWEST - 1)],
        [replace(view(i, 100), slo=SloProgress(None, 0.05)) for i in range(NUM)],
    ):
        planner = Counting()
        ahead = PlanAhead(planner)
        ahead.expect(planned(ahead, before), before, CONTEXT)
        assert len(planner.made) == 1


def test_a_plan_ahead_that_fails_is_counted_and_ends_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, requests = SimulatedCluster(1, Faults(), crash=0.0, hang=0.0, num_drafters=1), random_requests(random.Random(1))
    monkeypatch.setattr(PlanAhead, "expect", lambda *_: [][0])
    cluster.loop._deferred._is_asynchronous = True  # as on a GPU
    for request in requests:
        cluster.submit(request)
    with pytest.raises(AssertionError, match="num_failed_observations"):  # the cluster's own check, once all have ended
        cluster.run_until_finished()
    assert [tuple(cluster.outcomes[one.id].token_ids) for one in requests] == [plain_run(one) for one in requests]


@pytest.mark.parametrize("is_corrected", [True, False])
def test_a_plan_advances_the_policies_once(is_corrected: bool) -> None:
    """Whether it is corrected or made anew: what policies know then is what they know from plans after each pass."""
    ahead, alone = (StepPlanner(PlannerSettings(max_hold_s=0.0)) for _ in range(2))
    drafter = replace(DRAFTERS["d"], draft_s=0.01, draft_len=3.0, token_s=0.003)
    context = replace(CONTEXT, drafters={"d": drafter})
    planner = PlanAhead(ahead)
    for i in range(40):
        views = [view(k, 100 + 2 * i, (0.9,) * (3 if is_corrected or i % 2 else 1)) for k in range(NUM)]
        plan = planned(planner, views, context=context)
        alone.plan(views, context)
        planner.expect(plan, views, context)
    planned_last = planner._planner
    assert isinstance(planned_last, StepPlanner)
    assert (planned_last is ahead) is not is_corrected
    assert vars(planned_last._overlap._frontiers) == vars(alone._overlap._frontiers)
    assert vars(planned_last._verification) == vars(alone._verification)


def test_corrected_plans_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside drafters that crash and hang, and requests that are aborted."""
    corrected: list[bool] = []
    correct = PlanAhead.correct

    def counted(planner: PlanAhead, drafts: DraftsAtHand, capacity: Capacity) -> StepPlan | None:
        plan = correct(planner, drafts, capacity)
        corrected.append(plan is not None)
        return plan

    monkeypatch.setattr("router.planning.ahead.FEWEST", 1)
    monkeypatch.setattr("router.estimates.drafter_stats.MIN_RECORDS", 0)
    monkeypatch.setattr(PlanAhead, "correct", counted)
    num_aborted = 0
    for seed in range(20):
        faulty = seed % 2
        cluster = SimulatedCluster(seed, Faults(), crash=0.01 * faulty, hang=0.01 * faulty, num_drafters=1)
        cluster.loop._deferred._is_asynchronous = True  # as on a GPU
        requests = random_requests(random.Random(seed))
        for request in requests:
            cluster.submit(request)
        for _ in range(10 * faulty):
            cluster.turn()
        for request_id in cluster.unfinished[: 2 * faulty]:
            cluster.abort(request_id)
        cluster.run_until_finished()
        for one in requests:
            found, plain = tuple(cluster.outcomes[one.id].token_ids), plain_run(one)
            assert found == plain or (one.id in cluster.aborted and plain[: len(found)] == found), seed
            num_aborted += found != plain
        cluster.engine.check_integrity()
    assert corrected.count(True) > 20
    assert num_aborted
