"""``outrider bench policies``: named policies of draft length, verification and overlap, each against all others.

Simulated with the live loops on a virtual clock. In a closed loop goodput is committed tokens per second. On traces it is
given by the arrivals, so arms are compared by ``request_speed``: tokens per second of a request, from arrival to end.

- ``outrider_over_best_fixed``: the default over the best of the fixed lengths, worst over the traces.
- ``outrider_over_best_paper``: over the best of the papers' policies, worst over the traces.
- ``worst_over_plain.simulated``: over plain decoding, worst over batches of the closed loop, by goodput.
- ``slo_attainment.adaspec``, ``.outrider``: requests that meet a TPOT objective which all have, and at which AdaSpec
  attains about 0.90, on the machine and trace where the default is least ahead. ``slo_goodput_over_adaspec``,
  ``slo_ttft_over_adaspec``: worst over all.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.policy_scenarios import (
    ADASPEC_SLO,
    ARMS,
    DEFAULT,
    FIGURE_15,
    FIXED,
    PAPERS,
    PLAIN,
    TABLE_2,
    UNDER_SLO,
    Machine,
    Workload,
    gpu_machine,
    this_machine,
    workloads,
)
from benchmarks.pool import pool
from benchmarks.record import DEFAULT_PATH, record
from benchmarks.report import BenchOptions, BenchResult, Cell, Table, describe_environment
from cluster.config import Config, DrafterConfig, ModelConfig, Resources, TargetConfig, parts_of
from cluster.resolve import resolve
from deploy.profiling import ProfileEffort, measure_profile
from engine.loading import stored_profile
from profiler.hardware import here, num_cores
from profiler.profile import ProfiledCost
from router.cost_model import CostModel
from simulator.speculation import Arm, ArmResult, run_arm

SLO_LEVELS = (0.8, 1.0, 1.2)  # of the P90 of plain decoding's TPOT
SLO_TARGET = 0.90  # attainment of AdaSpec, at which the default is compared
SLO_RANGE, SLO_STEPS = (0.4, 2.0), 6  # of the search for it
AUTHORS, SIMULATED = "measured by the authors", "simulated: its models and GPUs are not here"
# Draft tokens, accepted, acceptance and speed-up on traces 1 to 3.
PAPER_TABLE_2 = (
    ("threshold", "5.97, 6.56, 5.26", "1.41, 1.42, 1.38", "0.24, 0.22, 0.26", "1.16, 1.22, 1.66"),
    ("adaspec-", "3.57, 3.13, 3.73", "1.22, 1.17, 1.26", "0.34, 0.37, 0.34", "1.71, 1.40, 1.78"),
    ("adaspec", "3.42, 2.96, 3.63", "1.20, 1.14, 1.25", "0.35, 0.39, 0.35", "1.73, 1.42, 1.79"),
)
# Of latencies up to 19%, 26% and 61% below that of fixed-4.
PAPER_FIGURE_15 = (
    ("faser", "1.23 of fixed-4", AUTHORS),
    ("early exit", "1.35 of fixed-4", "not reproducible: simulated passes have no layers to leave"),
    ("faser-overlap", "2.56 of fixed-4", AUTHORS),
)
ABLATIONS = (*TABLE_2, *FIGURE_15)
GPUS = (("a100-70b", "middle-1b"), ("h100-32b", "qwen-1.5b"))
DRAFTER = "cascade"  # of this machine's

Results = Mapping[str, ArmResult]  # by arm


class Case(NamedTuple):
    machine: str
    workload: str


class Job(NamedTuple):
    machine: Machine
    workload: Workload
    arm: Arm
    tpot_slo_s: float | None = None


def run(options: BenchOptions) -> BenchResult:
    console = Console(stderr=True)
    machines = (_here(options), *(gpu_machine(*one) for one in GPUS))
    loads = workloads(options.data, options.quick)
    traces = [load for load in loads if load.is_trace]
    ablated = traces[:1] if options.quick else loads
    jobs = [
        Job(machine, load, arm)
        for machine in machines
        for load in loads
        for arm in (*ARMS, *(ABLATIONS if load in ablated else ()))
    ]
    with ProcessPoolExecutor(num_cores(), get_context("spawn")) as processes:
        console.print(f"policies: {len(jobs)} simulations", highlight=False)
        found: dict[Case, dict[str, ArmResult]] = {}
        for job, result in zip(jobs, processes.map(simulated, jobs), strict=True):
            found.setdefault(Case(job.machine.name, job.workload.name), {})[job.arm.name] = result
        searches = [(machine, load, found[Case(machine.name, load.name)]) for machine in machines for load in traces[:2]]
        objectives = list(processes.map(under_objectives, searches))
    return BenchResult(
        "policies",
        figures(found, {load.name for load in loads if not load.is_trace}) | _slo_figures(objectives),
        tables=(
            *(_table(case, results) for case, results in found.items()),
            _paper_table(found),
            _slo_table([(machine.name, load.name) for machine, load, _ in searches], objectives),
        ),
        notes=(
            f"simulated: all figures. here: costs measured on this machine, the live {DRAFTER} over members with recorded "
            "agreement. Others: costs of a roofline, agreement of synthetic families.",
        ),
    )


def _here(options: BenchOptions) -> Machine:
    path = options.recording or DEFAULT_PATH
    if not path.exists():
        DEFAULT_PATH.parent.mkdir(exist_ok=True)
        record(options).save(path)
    everything = pool(options.model)
    config = next(config for config in everything if config.name == DRAFTER)
    _, *parts = parts_of(config.options)
    members = [member for member in everything if member.options in parts]
    return this_machine(measured_cost(options.model, [config, *members]), config, members, path)


def measured_cost(model: str, configs: Sequence[DrafterConfig]) -> CostModel:
    """From the machine's stored profile (`outrider profile`), otherwise measured now."""
    target = TargetConfig(resources=Resources(threads=describe_environment().num_threads))
    config = resolve(Config(model=ModelConfig(name=model), target=target, drafters=tuple(configs)), here())
    stored = stored_profile(config)
    if stored is not None:
        cost = ProfiledCost(stored, config)
        if all(cost.draft_s(one.name, 1, one.max_draft_len) is not None for one in configs):
            return cost
    return ProfiledCost(measure_profile(config, ProfileEffort.of(quick=True)), config)


def simulated(job: Job) -> ArmResult:
    machine, load = job.machine, job.workload
    spec, settings = machine.spec(), machine.settings()
    return run_arm(spec, settings, job.arm, load.load(machine), load.until_s(machine), job.tpot_slo_s)


class AtObjective(NamedTuple):
    """Of an arm whose requests all have a TPOT objective."""

    attainment: float
    goodput: float
    request_speed: float
    ttft_s: float  # mean


class Objective(NamedTuple):
    """``level``: over the P90 of plain decoding's TPOT. ``found``: by arm."""

    level: float
    found: dict[str, AtObjective]


def under_objectives(search: tuple[Machine, Workload, Results]) -> list[Objective]:
    """The arms of UNDER_SLO at SLO_LEVELS, and first where AdaSpec attains SLO_TARGET."""
    machine, load, results = search
    limit_s = float(np.quantile(results[PLAIN.name].tpot_s, 0.9))

    def attained(level: float, arm: Arm) -> AtObjective:
        result = simulated(Job(machine, load, arm, level * limit_s))
        ttft_s = float(result.ttft_s.mean())
        return AtObjective(result.attainment(level * limit_s), result.goodput, result.request_speed, ttft_s)

    low, high = SLO_RANGE
    for _ in range(SLO_STEPS):
        level = (low + high) / 2.0
        low, high = (low, level) if attained(level, ADASPEC_SLO).attainment > SLO_TARGET else (level, high)
    levels = (high, *SLO_LEVELS)
    return [Objective(level, {arm.name: attained(level, arm) for arm in UNDER_SLO}) for level in levels]


def _speed(case: Case, result: ArmResult, closed: set[str]) -> float:
    return result.goodput if case.workload in closed else result.request_speed


def figures(found: Mapping[Case, Results], closed: set[str]) -> dict[str, float]:
    """``closed``: names of the workloads that are closed loops."""
    told: dict[str, float] = {}
    fixed, papers = [arm.name for arm in (PLAIN, *FIXED)], [arm.name for arm in PAPERS]
    for name, arms in (("fixed", fixed), ("paper", papers)):
        ratios = {case: _over(case, results, [DEFAULT.name], arms, closed) for case, results in found.items()}
        told[f"outrider_over_best_{name}"] = min(r for case, r in ratios.items() if case.workload not in closed)
        told[f"outrider_over_best_{name}.closed"] = min((r for c, r in ratios.items() if c.workload in closed), default=1.0)
    over_plain = [
        results[DEFAULT.name].goodput / results[PLAIN.name].goodput
        for case, results in found.items()
        if case.workload in closed
    ]
    told["worst_over_plain.simulated"] = min(over_plain, default=1.0)
    return told


def _over(case: Case, results: Results, names: Sequence[str], others: Sequence[str], closed: set[str]) -> float:
    """The best arm of ``names`` over the best of ``others``."""

    def best_speed(names: Sequence[str]) -> float:
        return max(_speed(case, results[name], closed) for name in names if name in results)

    return best_speed(names) / best_speed(others)


def _slo_figures(objectives: Sequence[Sequence[Objective]]) -> dict[str, float]:
    pairs = [(levels[0].found["adaspec"], levels[0].found[DEFAULT.name]) for levels in objectives]
    adaspec, own = min(pairs, key=lambda pair: pair[1].attainment - pair[0].attainment)
    return {
        "slo_attainment.adaspec": adaspec.attainment,
        "slo_attainment.outrider": own.attainment,
        "slo_goodput_over_adaspec": min(own.goodput / adaspec.goodput for adaspec, own in pairs),
        "slo_ttft_over_adaspec": max(own.ttft_s / adaspec.ttft_s for adaspec, own in pairs),
    }


def _table(case: Case, results: Results) -> Table:
    limit_s = float(np.quantile(results[PLAIN.name].tpot_s, 0.9)) if len(results[PLAIN.name].tpot_s) else 0.0
    plain = results[PLAIN.name]
    rows: list[tuple[Cell, ...]] = []
    for arm in ARMS:
        one = results[arm.name]
        tpots, ttfts = 1e3 * one.tpot_s, 1e3 * one.ttft_s
        rows.append(
            (
                *(arm.name, one.goodput, one.goodput / plain.goodput, one.request_speed / plain.request_speed),
                float(tpots.mean()) if len(tpots) else "-",
                float(np.quantile(tpots, 0.99)) if len(tpots) else "-",
                float(ttfts.mean()) if len(ttfts) else "-",
                *(one.attainment(level * limit_s) if len(tpots) else "-" for level in SLO_LEVELS),
                *(one.accepted_len, one.rejected_share, one.verified_len),
            )
        )
    columns = (
        *("arm", "tokens/s", "over plain", "request speed over plain", "TPOT mean ms", "p99", "TTFT mean ms"),
        *(f"met at {level:g}" for level in SLO_LEVELS),
        *("accepted length", "rejected share", "verified a round"),
    )
    return Table(f"simulated: {case.machine}, {case.workload}", columns, tuple(rows))


def _paper_table(found: Mapping[Case, Results]) -> Table:
    """The papers' ablations, on traces: those of AdaSpec's table 2 and of FASER's figure 15."""
    rows: list[tuple[Cell, ...]] = [("paper, table 2", *row, AUTHORS) for row in PAPER_TABLE_2]
    rows += [("paper, figure 15", name, "-", "-", "-", over, how) for name, over, how in PAPER_FIGURE_15]
    for case, results in found.items():
        plain = results[PLAIN.name]
        for name in ("threshold", "adaspec-", "adaspec", "fixed-4", "faser", "faser-overlap"):
            if name in results and not case.workload.startswith("batch"):
                one = results[name]
                speedup = one.request_speed / plain.request_speed
                accepted = one.accepted_len - 1.0
                told = (one.verified_len, accepted, 1 - one.rejected_share, speedup, SIMULATED)
                rows.append((f"{case.machine}, {case.workload}", name, *told))
    columns = ("case", "arm", "draft tokens verified a round", "accepted", "acceptance", "speed-up in latency", "how")
    return Table("ablations of AdaSpec (table 2) and FASER (figure 15)", columns, tuple(rows))


def _slo_table(cases: Sequence[tuple[str, str]], objectives: Sequence[Sequence[Objective]]) -> Table:
    paper: tuple[Cell, ...] = ("paper, figure 11, trace 1", 1.0, "adaspec", "over 0.9", "-", "-", "-", AUTHORS)
    rows = tuple(
        (", ".join(case), level, name, *one[:3], 1e3 * one.ttft_s, SIMULATED)
        for case, levels in zip(cases, objectives, strict=True)
        for level, found in levels
        for name, one in found.items()
    )
    columns = ("case", "over plain P90", "arm", "attained", "tokens/s", "tokens/s of a request", "TTFT ms", "how")
    return Table("TPOT objectives, the first where adaspec attains about 0.90", columns, (paper, *rows))
