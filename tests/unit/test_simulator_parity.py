"""The simulator against the live loops: from the same course of things the same plans."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cluster.config import EpsilonGreedyPolicy, FixedPolicy, HedgePolicy, PolicyConfig
from router.assignment import AssignmentPolicy, Observation, ScoreCounts
from router.cost_model import TableCost
from router.plan import StepPlan
from router.planner import PlannerSettings, StepPlanner
from router.policies import build_policy
from router.policies.fixed import Fixed
from router.prompt_features import prompt_features
from simulator.agreement import SimulatedRequest
from simulator.simulation import ClusterSpec, DrafterSpec, Load, Simulation
from simulator.synthetic import DrafterFamily, Family
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass
from tests.support.live_on_a_clock import Noting as NotingPlanner
from tests.support.live_on_a_clock import run_live

FAMILY = Family(
    drafters={
        "quick": DrafterFamily(acceptance=0.5, spread=1.0, silence=0.3),
        "slow": DrafterFamily(acceptance=0.8, spread=1.0, decay=0.95),
    }
)


class Cost(TableCost):
    """Drafters that take a while, and need not catch up."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return {"quick": 0.001, "slow": 0.007}[drafter] * (1.0 + 0.01 * batch) * draft_len


COST = Cost((1, 8, 32), (0.02, 0.025, 0.06), 1e-6)


def spec(num_blocks: int = 64, verification: str = "goodput", ahead_len: int = 0, max_hold_s: float = 0.1) -> ClusterSpec:
    return ClusterSpec(
        COST,
        PackedPass(COST),
        DraftByCost(COST),
        TargetLimits(8, num_blocks, max_num_sequences=6, max_pass_tokens=48, max_model_len=96),
        (DrafterSpec("quick", 16, 4), DrafterSpec("slow", 16, 6, ahead_len)),
        lambda: StepPlanner(PlannerSettings(verification, max_hold_s, max_chunk_len=16)),
        slot_s=0.21,
        link_s=0.0007,
    )


def requests(num: int, seed: int) -> list[SimulatedRequest]:
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(0.15, num))
    found = []
    for i in range(num):
        prompt_len, output_len = int(random.integers(4, 30)), int(random.integers(5, 50))
        answer = FAMILY.answer(random, output_len, 6)
        chain = None if i % 5 else ("slow",)
        features = prompt_features((1,) * prompt_len) if chain is None else ()
        found.append(
            SimulatedRequest(
                f"r{i}", float(arrivals[i]), prompt_len, output_len + i % 3, answer, features=features, chain=chain
            )
        )
    return found


class Noting(Fixed):
    """One drafter for all, whose observations are kept."""

    def __init__(self, drafter: str) -> None:
        super().__init__(FixedPolicy(chain=(drafter,)))
        self.seen: list[Observation] = []

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = ()) -> None:
        self.seen.extend(observations)


def simulated(
    cluster: ClusterSpec, policy: AssignmentPolicy, load: list[SimulatedRequest]
) -> tuple[list[tuple[float, StepPlan]], dict[str, int]]:
    planner = NotingPlanner(cluster.planner())
    outcome = Simulation(replace(cluster, planner=lambda: planner), policy, Load(iter(load))).run()
    return planner.plans, {one.request.id: one.num_tokens for one in outcome.finished}


@pytest.mark.parametrize(
    ("cluster", "policy"),
    [
        (spec(), EpsilonGreedyPolicy(epsilon=0.2)),
        (spec(), HedgePolicy(exploration=0.2)),
        (spec(num_blocks=18), EpsilonGreedyPolicy(epsilon=0.2)),
        (spec(verification="all"), FixedPolicy(chain=("slow",))),
        (spec(ahead_len=4), FixedPolicy(chain=("slow",))),
        (spec(max_hold_s=0.0), FixedPolicy(chain=("slow",))),
        (spec(), FixedPolicy(chain=())),
    ],
    ids=[
        "two drafters, router",
        "hedge",
        "preemption",
        "verify all",
        "drafting ahead",
        "no holds",
        "target alone",
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_simulator_plans_as_the_live_loop_does(cluster: ClusterSpec, policy: PolicyConfig, seed: int) -> None:
    load = requests(14, seed)
    live_plans, live_tokens = run_live(cluster, build_policy(policy), load)
    plans, tokens = simulated(cluster, build_policy(policy), load)
    assert tokens == live_tokens == {request.id: request.output_len for request in load}
    for number, (mine, live) in enumerate(zip(plans, live_plans, strict=False)):
        assert mine[1] == live[1], f"plan {number}, at {live[0]}"
        assert mine[0] == pytest.approx(live[0], abs=1e-9)
    assert len(plans) == len(live_plans)


@pytest.mark.parametrize(("drafter", "num_blocks"), [("quick", 64), ("slow", 64), ("slow", 18)])
def test_the_simulator_observes_what_the_live_loop_does(drafter: str, num_blocks: int) -> None:
    load = requests(14, 1)
    live, mine = Noting(drafter), Noting(drafter)
    run_live(spec(num_blocks), live, load)
    simulated(spec(num_blocks), mine, load)
    found = [(o.request_id, o.num_rounds, o.num_in_time, o.num_missed, o.num_proposed, o.num_accepted) for o in mine.seen]
    seen = [(o.request_id, o.num_rounds, o.num_in_time, o.num_missed, o.num_proposed, o.num_accepted) for o in live.seen]
    assert found == seen
    assert sum(o.num_in_time for o in mine.seen)
    assert sum(o.num_awaited for o in mine.seen) < sum(o.num_rounds for o in mine.seen)


def test_what_is_compared_is_not_trivial() -> None:
    plans, _ = simulated(spec(num_blocks=18), build_policy(EpsilonGreedyPolicy(epsilon=0.2)), requests(14, 1))
    assert any(plan.preempted for _, plan in plans)
    assert any(plan.held for _, plan in plans)
    assert any(span.num_verify for _, plan in plans for span in plan.spans)
    assert any(span.num_compute > 1 for _, plan in plans for span in plan.spans)
