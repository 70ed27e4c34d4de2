"""A simulated cascade is the live one: it queries its model where that pays, and takes the time of those that it queried."""

from collections.abc import Iterator
from itertools import count

import pytest

from router.cost_model import TableCost
from router.drafter.seats import Fixed
from router.planning.planner import StepPlanner
from simulator.agreement import Agreement, AgreementAnswer, SimulatedRequest
from simulator.cascade import MemberSpec
from simulator.simulation import ClusterSpec, DrafterSpec, Load, SimulationResult, simulate
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass

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
