"""Service-level objectives in simulated clusters: what planning by them, and refusing what cannot meet them, is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from cluster.types import FinishReason, Slo
from router.cost_model import TableCost
from router.drafter.seats import Fixed
from router.drafting.verification import PassContext
from router.plan import SequenceView, StepPlan
from router.planning.planner import Planner, PlannerSettings, StepPlanner
from simulator.agreement import Agreement, AgreementAnswer, SimulatedRequest
from simulator.cascade import MemberSpec
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


# ---- A simulated cascade is the live one: it queries its model where that pays, and takes the time of those that it queried


NUM, PASS_S = 200, 0.02
LIMITS = TargetLimits(16, 4096, 16, 512, 4096)
MEMBERS = (MemberSpec("lookup", 0.0), MemberSpec("model", 0.15))


def costs(model_s: float) -> TableCost:
    """A pass takes PASS_S whatever its rows, a model's draft ``model_s`` for any batch, and lookups take no time."""

    class Cost(TableCost):
        def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:  # type: ignore[override]
            return 0.0 if drafter == "lookup" else model_s

    return Cost((1, 64), (PASS_S, PASS_S))


def agreement(right: int) -> Agreement:
    return Agreement(b"\4" * NUM, bytes([min(right, NUM - p) for p in range(NUM)]), flat=(0.6 if right else 0.3,) * 4)


def served(
    num_right: dict[str, int],
    model_s: float,
    concurrency: int,
    members: tuple[MemberSpec, ...],
    ahead_len: int = 0,
    companion: bool = True,
) -> SimulationResult:
    """``num_right``: of the drafts of each member."""
    cost = costs(model_s)
    answer = AgreementAnswer(NUM, {name: agreement(right) for name, right in num_right.items()})
    name = "cascade" if len(members) > 1 else members[0].name
    drafter = DrafterSpec(name, 64, 4, ahead_len, companion=companion, members=members)
    spec = ClusterSpec(cost, PackedPass(cost), DraftByCost(cost), LIMITS, (drafter,), StepPlanner)

    def requests() -> Iterator[SimulatedRequest]:
        for number in count():
            yield SimulatedRequest(f"r{number}", 0.0, 10, NUM, answer)

    chain = Fixed((name,))
    return simulate(spec, chain, Load(requests(), concurrency), until_s=20.0)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_model_that_costs_more_than_it_gains_is_left_to_its_trials(concurrency: int) -> None:
    """It takes two passes and is right where the lookup is: 3 tokens a round by the lookup alone."""
    num_right = {"lookup": 2, "model": 3}
    alone = served(num_right, 2 * PASS_S, concurrency, MEMBERS[:1])
    both = served(num_right, 2 * PASS_S, concurrency, MEMBERS)
    assert alone.accepted_len > 2.9
    assert both.goodput > 0.95 * alone.goodput
    assert both.drafter_busy["cascade"] < 0.05


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_model_that_gains_more_than_it_costs_is_queried_and_its_drafts_take_their_time(concurrency: int) -> None:
    """It takes half a pass, and adds four tokens to each."""
    num_right = {"lookup": 0, "model": 4}
    both = served(num_right, PASS_S / 2, concurrency, MEMBERS)
    assert both.accepted_len > 4.5
    assert both.goodput == pytest.approx(concurrency * 5 / (1.5 * PASS_S), rel=0.1)
    assert both.drafter_busy["cascade"] == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("concurrency", [4, 16])
@pytest.mark.parametrize("ahead_len", [0, 4])
def test_a_cascade_on_a_device_of_its_own_drafts_as_its_model_alone(concurrency: int, ahead_len: int) -> None:
    """Its target, which knows the acceptance of the cascade, would leave one whose model is mostly not queried."""
    num_right = {"lookup": 0, "model": 4}
    found = [
        served(num_right, PASS_S / 2, concurrency, members, ahead_len, companion=False) for members in (MEMBERS, MEMBERS[1:])
    ]
    both, alone = found
    assert both.goodput > 0.9 * alone.goodput
    assert both.drafter_busy["cascade"] > 0.8 * alone.drafter_busy["model"]


def test_drafts_ahead_of_a_model_take_their_time() -> None:
    """Drafts on the target's thread, of which most are of tokens that are not committed yet."""
    busy = served({"model": 4}, 0.6 * PASS_S, 4, MEMBERS[1:], ahead_len=4).drafter_busy["model"]
    assert busy > 0.5
