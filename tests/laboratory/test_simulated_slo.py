"""Service-level objectives in simulated clusters: what planning by them, and refusing what cannot meet them, is worth."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.types import FinishReason, Slo
from router.cost_model import TableCost
from router.drafter.seats import Fixed
from router.drafting.verification import PassContext
from router.plan import SequenceView, StepPlan
from router.planning.planner import Planner, PlannerSettings, StepPlanner
from simulator.agreement import SimulatedRequest
from simulator.simulation import ClusterSpec, DrafterSpec, Load, SimulationResult, simulate
from simulator.synthetic import DrafterFamily, Family
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass

FAMILY = Family(drafters={"small": DrafterFamily(acceptance=0.6, spread=1.0)})
TIGHT, BATCH = Slo(0.5, 0.05, "tight"), Slo(None, None, "batch")


class Cost(TableCost):
    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return 0.0005 * draft_len


COST = Cost((1, 16, 512), (0.02, 0.024, 0.2), 1e-7)


class Blind(Planner):
    """Plans as if no request had objectives."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def plan(self, sequences: Sequence[SequenceView], context: PassContext) -> StepPlan:
        return self._planner.plan([replace(s, slo=None) for s in sequences], context)


def mixed(rate: float, num: int = 240, tight: Slo = TIGHT, seed: int = 0) -> list[SimulatedRequest]:
    """Two of three requests are short and tight, the others have long prompts and no objectives."""
    random = np.random.default_rng(seed)
    requests = []
    for i, at_s in enumerate(np.cumsum(random.exponential(1.0 / rate, num)).tolist()):
        prompt_len, num_tokens, slo = (60, 40, tight) if i % 3 else (1200, 60, BATCH)
        answer = FAMILY.answer(random, num_tokens, 4)
        requests.append(SimulatedRequest(f"r{i}", at_s, prompt_len, num_tokens, answer, slo=slo))
    return requests


def run(requests: list[SimulatedRequest], plans: bool = True, **changes: Any) -> SimulationResult:
    settings = PlannerSettings(max_chunk_len=512)
    spec = ClusterSpec(
        COST,
        PackedPass(COST),
        DraftByCost(COST),
        TargetLimits(16, 4096, 32, 512, 4096),
        (DrafterSpec("small", 32, 4),),
        lambda: StepPlanner(settings) if plans else Blind(StepPlanner(settings)),
        sheds=False,
    )
    return simulate(replace(spec, **changes), Fixed(("small",)), Load(iter(requests)), seed=1)


def met(outcome: SimulationResult, name: str = "tight") -> float:
    counts = outcome.attainment()[name]
    return counts.num_met / counts.num_answers


def uniform(rate: float, num: int = 150, slo: Slo = TIGHT, seed: int = 0) -> list[SimulatedRequest]:
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1.0 / rate, num)).tolist()
    return [
        SimulatedRequest(f"r{i}", at_s, 200, 40, FAMILY.answer(random, 40, 4), slo=slo) for i, at_s in enumerate(arrivals)
    ]


def test_planning_by_objectives_raises_attainment_and_keeps_goodput() -> None:
    load = mixed(4.0)
    planned, blind = run(load), run(load, plans=False)
    assert met(blind) < 0.7
    assert met(planned) > 0.9
    assert planned.goodput > 0.95 * blind.goodput
    assert planned.attainment()["batch"].num_answers == blind.attainment()["batch"].num_answers == len(load) / 3


def test_requests_without_objectives_are_planned_as_before() -> None:
    load = [replace(request, slo=Slo()) for request in mixed(4.0, 60)]
    planned, blind = run(load, sheds=True), run(load, plans=False)
    assert [(f.request.id, f.first_token_s, f.end_s) for f in planned.finished] == [
        (f.request.id, f.first_token_s, f.end_s) for f in blind.finished
    ]


def test_best_effort_ends_beside_objectives_that_cannot_be_met() -> None:
    """And as soon as if the others had none."""
    hopeless = run(mixed(4.0, 60, tight=Slo(0.001, 0.001, "tight")))
    blind = run(mixed(4.0, 60), plans=False)
    assert met(hopeless) == 0.0
    assert hopeless.goodput == pytest.approx(blind.goodput, rel=0.03)
    latest = [max(f.end_s for f in one.finished if f.request.slo.name == "batch") for one in (hopeless, blind)]
    assert latest[0] == pytest.approx(latest[1], rel=0.03)


def test_a_target_refuses_what_it_could_not_begin_in_time_at_overload_alone() -> None:
    calm = run(uniform(4.0), sheds=True).attainment()["tight"]
    assert (calm.num_refused, calm.num_ttft_missed) == (0, 0)
    shedding = run(uniform(14.0), sheds=True)
    counts, without = shedding.attainment()["tight"], run(uniform(14.0)).attainment()["tight"]
    assert without.num_refused == 0
    assert counts.num_refused > 0
    assert counts.num_ttft_met > 1.5 * without.num_ttft_met, "fewer answers, more of them in time"
    refusals = [f for f in shedding.finished if f.finish is FinishReason.OVERLOADED]
    assert len(refusals) == counts.num_refused


def test_no_overload_refuses_requests_without_objectives() -> None:
    for slo in (Slo(), Slo(tpot_s=0.05, name="tight"), Slo(name="batch")):
        outcome = run(uniform(14.0, 60, slo), sheds=True)
        assert all(f.finish is FinishReason.LENGTH for f in outcome.finished)
