"""One trace on one fleet: how it is scaled, and every policy that is played on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from router.scaling.policy import FleetLimits, FleetScaler
from router.scaling.report import FleetSize
from router.scaling.service_rates import DrafterSize, Objectives, ServiceRates, TargetSize, Workload
from simulator.autoscale.arrivals import RATE_WINDOW_S, Arrivals, MadeUp, from_rates, scaled
from simulator.autoscale.baselines import Fixed, QueueLength, ServeDefault, Utilisation
from simulator.autoscale.fleet import Fleet, Outcome, Policy, Sample, StartUp, run
from simulator.roofline import Placed, RooflineCost
from simulator.scenario import AutoscaleScenario

OUTRIDER, SERVE, SERVE_DRAFTING, QUEUE, BUSY, FIXED = (
    "outrider",
    "serve default, targets alone",
    "serve default, with drafters",
    "queue length",
    "utilisation",
    "fixed at the whole fleet",
)
DRAFTER_SHARE = 0.8  # of a drafter's capacity that Serve's rule shall keep in use
ENOUGH = 0.995  # share of requests that meet their objectives on `peak_share` of the fleet, which scales the trace
NUM_FURTHER = 3  # settings between two of the first ones
SAMPLES = 400.0  # for pictures, of a trace
PHASE_S = 1200.0
SETTLING_SAMPLES = 600  # of a phase: what comes after is no answer to its beginning
WEEK_STEP_S = 2.0
STEP_S = 1.0

Tunable = Callable[[float], Policy]


@dataclass(frozen=True, slots=True)
class Played:
    """A policy's best run: the cheapest of those that attain what was asked, or the one that attains most."""

    policy: str
    setting: float | None  # what it was tuned to
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CaseResult:
    trace: str
    num_gpus: int
    factor: float  # by which requests were multiplied
    duration_s: float
    played: Mapping[str, Played]  # tuned to the goal
    serve_same: Played  # Serve's default, tuned to what ours attains
    ours: Outcome


class Case:
    """``arrivals`` are of the fleet's size."""

    def __init__(self, scenario: AutoscaleScenario, num_gpus: int, arrivals: Arrivals, factor: float, step_s: float) -> None:
        self._scenario, self._arrivals, self._factor, self._step_s = scenario, arrivals, factor, step_s
        self._drafting = _fleet(scenario, num_gpus, service_rates(scenario))
        self._alone = _fleet(scenario, num_gpus, service_rates(scenario, drafting=False))

    def play(self, num_settings: int) -> CaseResult:
        scenario, fleet = self._scenario, self._drafting
        most, least = fleet.max_targets, min(scenario.min_targets, fleet.max_targets)
        limits = FleetLimits(fleet.max_gpus, least)
        scaler = FleetScaler(fleet.rates, fleet.objectives, limits, scenario.target_start_s, scenario.attainment)
        ours = self._run(fleet, scaler, (self._arrivals.duration_s - fleet.warm_up_s) / SAMPLES)
        drafters = {
            name: (DRAFTER_SHARE * size.capacity, int(fleet.max_gpus / size.num_gpus))
            for name, size in fleet.rates.drafters.items()
        }
        ongoing = np.geomspace(0.25, scenario.max_num_sequences, num_settings).tolist()
        asked = (scenario.attainment, ours.attainment)
        serve = self._tuned(SERVE, self._alone, lambda x: ServeDefault(x, most, {}, least), ongoing, asked)
        if drafters:
            serve += self._tuned(SERVE_DRAFTING, fleet, lambda x: ServeDefault(x, most, drafters, least), ongoing, asked)
        waiting = np.geomspace(0.05, 20.0, max(3, num_settings // 3)).tolist()
        busy = np.linspace(0.1, 0.9, max(3, num_settings // 3)).tolist()
        runs = {
            SERVE: [one for one in serve if one.policy == SERVE],
            SERVE_DRAFTING: [one for one in serve if one.policy == SERVE_DRAFTING],
            QUEUE: self._settings(QUEUE, self._alone, lambda x: QueueLength(x, most, least), waiting),
            BUSY: self._settings(BUSY, self._alone, lambda x: Utilisation(x, most, least), busy),
            FIXED: [Played(FIXED, None, self._run(self._alone, Fixed(FleetSize(most))))],
        }
        played = {name: best(found, scenario.attainment) for name, found in runs.items() if found}
        same = best(serve, ours.attainment)
        played[OUTRIDER] = Played(OUTRIDER, None, ours)
        arrivals = self._arrivals
        return CaseResult(arrivals.name, int(fleet.max_gpus), self._factor, arrivals.duration_s, played, same, ours)

    def _settings(self, name: str, fleet: Fleet, policy: Tunable, settings: list[float]) -> list[Played]:
        return [Played(name, setting, self._run(fleet, policy(setting))) for setting in settings]

    def _tuned(
        self, name: str, fleet: Fleet, policy: Tunable, settings: list[float], asked: Sequence[float]
    ) -> list[Played]:
        """``settings`` from cautious to thrifty, and more of them where each attainment that is asked for is lost."""
        runs = self._settings(name, fleet, policy, settings)
        further: set[float] = set()
        for attainment in asked:
            enough = [one.setting for one in runs if one.setting and one.outcome.attainment >= attainment]
            after = [one for one in settings if enough and one > max(enough)]
            if after:
                further.update(np.geomspace(max(enough), after[0], NUM_FURTHER + 2)[1:-1].tolist())
        return runs + self._settings(name, fleet, policy, sorted(further))

    def _run(self, fleet: Fleet, policy: Policy, sample_s: float = 0.0) -> Outcome:
        return run(fleet, self._arrivals, policy, self._step_s, FleetSize(fleet.max_targets), sample_s)


def best(runs: list[Played], attainment: float) -> Played:
    """The cheapest that attains it, else the one that attains most."""
    enough = [one for one in runs if one.outcome.attainment >= attainment]
    if enough:
        return min(enough, key=lambda one: one.outcome.gpu_h)
    return max(runs, key=lambda one: (one.outcome.attainment, -one.outcome.gpu_h))


def service_rates(scenario: AutoscaleScenario, drafting: bool = True) -> ServiceRates:
    target = Placed(
        shape=scenario.target.shape,
        device=scenario.devices[scenario.target.device],
        parallelism=scenario.target.parallelism,
    )
    used = scenario.drafters if drafting else {}
    placed = {name: Placed(shape=d.shape, device=scenario.devices[d.device]) for name, d in used.items()}
    sizes = {name: DrafterSize(1.0, d.capacity, d.acceptance, d.max_draft_len) for name, d in used.items()}
    size = TargetSize(float(scenario.target.parallelism), scenario.max_num_sequences, target.kv_tokens())
    return ServiceRates(RooflineCost(target, placed), size, sizes)


@dataclass(frozen=True, slots=True)
class Following:
    """Longest times after a sudden change of load, by the number of drafters that are ready. A tenth is no difference."""

    lacking_s: float  # until there are, and stay, no fewer than at the end of the phase
    surplus_s: float  # until there are, and stay, no more


def drafters_following(scenario: AutoscaleScenario, num_gpus: int) -> Following:
    """Phases of twenty minutes, at a tenth and at half of what the fleet serves, in turn."""
    fleet = _fleet(scenario, num_gpus, service_rates(scenario), 0.0)
    made = MadeUp("steps", ((0.0, 1.0), (1.0, 1.0)))
    most = (
        fleet.max_targets
        * fleet.rates.service(Workload(made.prompt_len, made.output_len), fleet.objectives, {}).requests_per_s
    )
    levels = [share * most for share in (0.1, 0.5, 0.1, 0.5)]
    points = [(i * PHASE_S + at, level) for i, level in enumerate(levels) for at in (0.0, PHASE_S - 1.0)]
    arrivals = replace(made, points=tuple(points)).arrivals(np.random.default_rng(scenario.seed))
    limits = FleetLimits(fleet.max_gpus, min(scenario.min_targets, fleet.max_targets))
    scaler = FleetScaler(fleet.rates, fleet.objectives, limits, scenario.target_start_s, scenario.attainment)
    samples = run(fleet, arrivals, scaler, STEP_S, FleetSize(fleet.max_targets), STEP_S).samples
    phases = [following(samples, phase * PHASE_S) for phase in range(1, len(levels))]
    return Following(max(one.lacking_s for one in phases), max(one.surplus_s for one in phases))


def following(samples: Sequence[Sample], begin_s: float) -> Following:
    """In the phase from then on."""
    found = [one for one in samples if begin_s <= one.at_s < begin_s + PHASE_S - 1.0]
    final = median(one.num_drafters for one in found[-300:])
    settling = found[:SETTLING_SAMPLES]
    lacking = [one.at_s for one in settling if one.num_drafters < 0.9 * final]
    surplus = [one.at_s for one in settling if one.num_drafters > 1.1 * final]
    return Following(*(times[-1] - begin_s + STEP_S if times else 0.0 for times in (lacking, surplus)))


def _fleet(scenario: AutoscaleScenario, num_gpus: int, rates: ServiceRates, warm_up_s: float | None = None) -> Fleet:
    objectives = Objectives(scenario.ttft_ms / 1e3, scenario.tpot_ms / 1e3)
    start = StartUp(scenario.target_start_s, scenario.drafter_start_s)
    return Fleet(rates, objectives, start, num_gpus, scenario.warm_up_s if warm_up_s is None else warm_up_s)


def trace_case(scenario: AutoscaleScenario, num_gpus: int, arrivals: Arrivals) -> Case:
    """Multiplied by the greatest factor at which `peak_share` of the fleet, always on and without drafters, meets the
    objectives of ENOUGH of the requests."""
    fleet = _fleet(scenario, num_gpus, service_rates(scenario, drafting=False), 0.0)
    size = FleetSize(max(1, int(scenario.peak_share * fleet.max_targets)))

    def fits(factor: float) -> bool:
        outcome = run(fleet, _multiplied(scenario, arrivals, factor), Fixed(size), STEP_S, size)
        return outcome.attainment >= ENOUGH

    low, high = 0.01 * num_gpus, 2.0 * num_gpus
    for _ in range(10):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Case(scenario, num_gpus, _multiplied(scenario, arrivals, low), low, STEP_S)


def _multiplied(scenario: AutoscaleScenario, arrivals: Arrivals, factor: float) -> Arrivals:
    return scaled(arrivals, factor, np.random.default_rng(scenario.seed))


def rates_case(
    scenario: AutoscaleScenario, num_gpus: int, name: str, rates: list[float], lengths: Arrivals, days: float | None
) -> Case:
    """So that the busiest ten minutes take `peak_share` of the fleet. ``days``: that are played; None: all."""
    played = rates if days is None else rates[: round(days * 86_400.0 / RATE_WINDOW_S)]
    alone = service_rates(scenario, drafting=False)
    objectives = Objectives(scenario.ttft_ms / 1e3, scenario.tpot_ms / 1e3)
    mean = Workload(float(lengths.prompt_len.mean()), float(lengths.output_len.mean()))
    most = scenario.peak_share * (num_gpus // alone.target.num_gpus) * alone.service(mean, objectives, {}).requests_per_s
    factor = most / max(played)
    arrivals = from_rates(name, played, factor, lengths, np.random.default_rng(scenario.seed), WEEK_STEP_S)
    return Case(scenario, num_gpus, replace(arrivals, name=name), factor, WEEK_STEP_S)
