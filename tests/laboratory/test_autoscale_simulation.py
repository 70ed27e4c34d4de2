"""The fluid of fleets against what can be computed by hand, the policies of others, traces, and the study."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import simulate
from benchmarks.studies import autoscale
from cluster.errors import InvalidField
from router.cost_model import TableCost
from router.scaling.report import FleetReport, FleetSize, Replicas
from router.scaling.service_rates import Objectives, ServiceRates, TargetSize
from simulator.autoscale import arrivals as traces
from simulator.autoscale.arrivals import Arrivals
from simulator.autoscale.baselines import Fixed, QueueLength, ServeDeployment, Utilisation
from simulator.autoscale.cases import PHASE_S, Following, Played, best, drafters_following, following
from simulator.autoscale.fleet import Fleet, Outcome, Sample, StartUp, run
from simulator.scenario import AutoscaleScenario, read_scenario

COST = TableCost((1, 2), (0.01, 0.0101))  # a prompt token takes 0.1 ms
RATES = ServiceRates(COST, TargetSize(2.0, 16, 1_000_000), {})


def fleet(max_gpus: float = 64.0, start_s: float = 40.0, tpot_s: float = 0.5) -> Fleet:
    return Fleet(RATES, Objectives(2.0, tpot_s), StartUp(start_s, 20.0), max_gpus)


def steady(per_s: float, seconds: float, prompt_len: float = 1000.0, output_len: float = 10.0) -> Arrivals:
    at = np.arange(0.5 / per_s, seconds, 1.0 / per_s)
    ones = np.ones(len(at))
    return Arrivals("steady", at, prompt_len * ones, output_len * ones, ones, seconds)


class Changing:
    """As many targets as it is told from each moment on."""

    period_s = 1.0

    def __init__(self, *sizes: tuple[float, int]) -> None:
        self._sizes = sizes

    def decide(self, report: FleetReport) -> FleetSize:
        return FleetSize([num for at_s, num in self._sizes if at_s <= report.now_s][-1])


def played(one: Fleet, load: Arrivals, num: int) -> Outcome:
    return run(one, load, Fixed(FleetSize(num)), 1.0, FleetSize(num))


def test_what_fits_meets_its_objectives_and_costs_its_gpus() -> None:
    outcome = played(fleet(), steady(5.0, 600.0), 2)  # 0.1 s of a prompt each: a quarter of two targets
    assert outcome.attainment == 1.0
    assert outcome.gpu_h == pytest.approx(2 * 2 * 600 / 3600, rel=0.02)


@pytest.mark.parametrize("per_s", [30.0, 60.0])
def test_what_does_not_fit_is_refused(per_s: float) -> None:
    outcome = played(fleet(), steady(per_s, 600.0, output_len=1.0), 1)  # prompts of one target: ten a second
    assert outcome.refused == pytest.approx(1.0 - 10.0 / per_s, rel=0.1)


def test_replicas_serve_when_they_have_started_and_are_paid_from_the_decision() -> None:
    # Twenty a second for ten minutes, on one target and from 100 s on three.
    load = steady(20.0, 600.0, output_len=1.0)
    at_once = run(fleet(start_s=0.0), load, Changing((0.0, 1), (100.0, 3)), 1.0, FleetSize(1))
    later = run(fleet(start_s=60.0), load, Changing((0.0, 1), (100.0, 3)), 1.0, FleetSize(1))
    # Sixty seconds at twenty a second, of which half are refused.
    assert (later.refused - at_once.refused) * later.num_requests == pytest.approx(60 * 10, rel=0.1)
    assert later.gpu_h == pytest.approx(at_once.gpu_h, rel=0.01)


def test_tokens_that_come_late_miss_their_objective() -> None:
    # A pass takes 10 ms and more with each request of a batch, so that sixteen are slower than one.
    slow = ServiceRates(TableCost((1, 16), (0.01, 0.1)), TargetSize(2.0, 16, 1_000_000), {})
    load = steady(0.7, 600.0, prompt_len=1.0, output_len=200.0)
    tight, loose = (
        played(Fleet(slow, Objectives(2.0, tpot_s), StartUp(40.0, 20.0), 64.0), load, 1) for tpot_s in (0.012, 0.2)
    )
    assert loose.attainment > 0.9 > tight.attainment


def test_warm_up_counts_for_nothing() -> None:
    one, load = fleet(), steady(5.0, 600.0)
    warm = Fleet(one.rates, one.objectives, one.start_up, one.max_gpus, warm_up_s=300.0)
    assert played(warm, load, 2).gpu_h == pytest.approx(played(one, load, 2).gpu_h / 2, rel=0.05)
    assert played(warm, load, 2).num_requests == pytest.approx(1500, abs=2)


# ---- what others decide


def test_serves_rule_is_rays() -> None:
    """On random loads, decision by decision, against `ray.serve.autoscaling_policy`."""
    ray_policy = pytest.importorskip("ray.serve.autoscaling_policy")
    from ray.serve.config import AutoscalingConfig

    config = AutoscalingConfig(min_replicas=1, max_replicas=40, target_ongoing_requests=7.0)
    chance = random.Random(5)
    ours, state, target, theirs_target, load, changes = ServeDeployment(7.0, 40), {}, 3, 3, 20.0, 0
    seen: list[float] = []
    for second in range(6000):
        if chance.random() < 0.01:
            load = chance.choice((2.0, 20.0, 90.0, 200.0))
        num = max(0.0, load + chance.gauss(0.0, 0.2 * load))
        seen.append(num)
        mean = sum(seen[-31:]) / len(seen[-31:])
        context = SimpleNamespace(
            current_num_replicas=theirs_target,
            target_num_replicas=theirs_target,
            total_num_requests=mean,
            config=config,
            policy_state=state,
        )
        desired, _ = ray_policy._core_replica_queue_length_policy(context)
        desired = ray_policy._apply_scaling_factors(desired, theirs_target, config)
        desired = min(max(desired, 1), 40)
        theirs, state = ray_policy._apply_delay_logic(desired, theirs_target, config, state, _now=float(second))
        mine = ours.decide(float(second), num, target)
        assert mine == theirs
        changes += mine != target
        target, theirs_target = mine, theirs
    assert changes > 5  # the load made it decide


def test_kubernetes_goes_up_at_once_and_down_after_five_minutes() -> None:
    policy = Utilisation(0.5, 64)
    assert policy.decide(FleetReport(0.0, Replicas(4), busy=1.0)).num_targets == 8
    assert policy.decide(FleetReport(15.0, Replicas(8), busy=0.52)).num_targets == 8  # within the tolerance
    assert policy.decide(FleetReport(30.0, Replicas(8), busy=0.1)).num_targets == 8
    assert policy.decide(FleetReport(310.0, Replicas(8), busy=0.1)).num_targets == 8
    assert policy.decide(FleetReport(340.0, Replicas(8), busy=0.1)).num_targets == 2
    assert QueueLength(2.0, 64).decide(FleetReport(0.0, Replicas(4), num_waiting=20.0)).num_targets == 8


# ---- arrivals


def test_scaling_repeats_requests_within_their_seconds() -> None:
    one = steady(5.0, 600.0)
    for factor in (0.3, 3.7, 40.0):
        more = traces.scaled(one, factor, np.random.default_rng(0))
        assert more.num_requests == pytest.approx(factor * one.num_requests, rel=0.05)
        assert set(np.unique(more.arrival_s)) <= set(one.arrival_s)


def test_rounded_moments_are_spread(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "arrival_s,prompt_tokens,output_tokens\n0.0,5,5\n0.0,6,6\n0.0,7,7\n3.0,5,5\n10.0,5,5\n", encoding="utf-8"
    )
    assert traces.trace(file).arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0, 10.0]


def test_rates_become_as_many_requests(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("model,window_start_s,requests_per_s\na,0,2\na,600,0\na,1200,4\n", encoding="utf-8")
    rates = traces.read_rates(file)["a"]
    drawn = traces.from_rates("a", rates, 2.0, steady(1.0, 100.0), np.random.default_rng(0), 2.0)
    per_window = np.histogram(drawn.arrival_s, bins=[0, 600, 1200, 1800], weights=drawn.weight)[0]
    assert per_window.tolist() == pytest.approx([2400, 0, 4800], rel=0.1)


def test_folders_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="has no traces"):
        traces.read_folder(tmp_path)
    (tmp_path / "rates.csv").write_text("model,window_start_s\nm,0\n", encoding="utf-8")
    with pytest.raises(InvalidField, match="requests_per_s"):
        traces.read_rates(tmp_path / "rates.csv")


# ---- the study


def result(attainment: float, gpu_h: float) -> Played:
    return Played("p", 1.0, Outcome(1.0, attainment, 1.0, 0.0, gpu_h, 0.0, 1.0, 0, 0.0))


def test_the_best_setting_is_the_cheapest_that_attains_enough() -> None:
    runs = [result(0.999, 9.0), result(0.992, 5.0), result(0.98, 2.0)]
    assert best(runs, 0.99).outcome.gpu_h == 5.0
    assert best(runs, 0.9999).outcome.gpu_h == 9.0


def test_drafters_that_lack_and_surplus_ones_are_told_apart() -> None:
    """From 100 s on: too few for 30 s, too many for another 50 s, then ten."""
    num_ready = [2] * 130 + [14] * 50 + [10] * 1000
    samples = [Sample(float(second), 1, num, 0.0, 0.0) for second, num in enumerate(num_ready)]
    assert following(samples, 100.0) == Following(lacking_s=30.0, surplus_s=80.0)
    assert following(samples, 200.0) == Following(lacking_s=0.0, surplus_s=0.0)


def test_the_only_drafter_of_a_small_fleet_follows_a_sudden_load_within_a_minute() -> None:
    """The forecast has less to keep ready than the need of the moment at first, and a plan for that has no drafter."""
    scenario = read_scenario(simulate.find("autoscale"))
    assert isinstance(scenario, AutoscaleScenario)
    assert drafters_following(scenario, 8).lacking_s <= 60.0


def test_the_study_plays_made_up_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = read_scenario(simulate.find("autoscale"))
    assert isinstance(scenario, AutoscaleScenario)
    small = scenario.model_copy(update={"fleets": (16,), "week_fleets": (16,)})
    monkeypatch.setattr(autoscale, "NUM_QUICK_SETTINGS", 3)
    said: list[str] = []
    study = autoscale.run(small, said.append, None, quick=True)
    assert study.figures["num_cases"] == 3.0
    assert 0.9 < study.figures["slo_attainment.min"] <= 1.0
    assert 0.3 < study.figures["cost_over_serve_default"] < 1.5
    assert 0.0 < study.figures["drafter_follow_s"] < PHASE_S  # they settle; docs/measurements/autoscale.md has the goal
    assert study.figures["drafter_surplus_s"] < PHASE_S
    assert autoscale.NO_DATA in said
