"""Autoscaling policies against each other: ours, Ray Serve's default, queue length and utilisation, on traces and on a week.

Ours has one setting for all. Every other policy is tuned to each trace and fleet in hindsight: the cheapest of its settings
that attains the goal, or for `cost_over_serve_default` what ours attains there. Serve's default scales targets alone, or
targets and drafters as two deployments, whichever is cheaper.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import exp, log
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from time import perf_counter

import numpy as np

from profiler.hardware import num_cores
from simulator.autoscale.arrivals import RATES_FILE, day_and_bursts, read_folder, read_rates, trace
from simulator.autoscale.cases import (
    BUSY,
    FIXED,
    OUTRIDER,
    QUEUE,
    SERVE,
    SERVE_DRAFTING,
    CaseResult,
    Following,
    best,
    drafters_following,
    rates_case,
    trace_case,
)
from simulator.plots import Panel
from simulator.scenario import AutoscaleScenario
from simulator.study import Cell, Said, Study, StudyTable

POLICIES = (OUTRIDER, SERVE, SERVE_DRAFTING, QUEUE, BUSY, FIXED)
NUM_SETTINGS, NUM_WEEK_SETTINGS, NUM_QUICK_SETTINGS = 24, 6, 10
QUICK_DAYS = 0.5
LENGTHS_OF = {"deepseek-r1": "r1"}  # model of the rates -> part of the name of the trace with its lengths
OTHER_LENGTHS = "mlarge"
NO_DATA = "no folder of traces (OUTRIDER_DATA or --data): made-up arrivals are played, and no week"


def run(scenario: AutoscaleScenario, said: Said, data: Path | None, quick: bool) -> Study:
    begun_s = perf_counter()
    jobs = _jobs(scenario, data, quick)
    if data is None:
        said(NO_DATA)
    num_processes = min(len(jobs), num_cores())
    said(f"{len(jobs)} cases in {num_processes} processes")
    results = []
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as processes:
        running = [processes.submit(job) for job in jobs]
        following = [processes.submit(drafters_following, scenario, num_gpus) for num_gpus in scenario.fleets]
        for case in running:
            result = case.result()
            results.append(result)
            met = f"{result.ours.attainment:.4f} met"
            said(f"{result.trace}, {result.num_gpus} GPUs: {met}, {_over_serve(result):.3f} of Serve's cost")
        followed = [one.result() for one in following]
    return _study(scenario, results, followed, perf_counter() - begun_s, data)


def _jobs(scenario: AutoscaleScenario, data: Path | None, quick: bool) -> list[Callable[[], CaseResult]]:
    """Each runs in a process of its own."""
    num = NUM_QUICK_SETTINGS if quick else NUM_SETTINGS
    if data is None:
        made = range(len(day_and_bursts()))
        return [partial(_made_up, scenario, gpus, index, num) for gpus in scenario.fleets for index in made]
    paths = read_folder(data)
    jobs: list[Callable[[], CaseResult]] = []
    rates = data / "traces" / RATES_FILE
    if rates.is_file():  # the longest first
        days = QUICK_DAYS if quick else None
        for gpus in scenario.week_fleets:
            for model in read_rates(rates):
                lengths = _lengths(paths, model)
                jobs.append(partial(_week, scenario, gpus, rates, model, lengths, NUM_WEEK_SETTINGS, days))
    return jobs + [partial(_trace, scenario, gpus, path, num) for gpus in scenario.fleets for path in paths]


def _lengths(paths: Sequence[Path], model: str) -> Path:
    wanted = LENGTHS_OF.get(model, OTHER_LENGTHS)
    return next((path for path in paths if wanted in path.name), paths[0])


def _made_up(scenario: AutoscaleScenario, num_gpus: int, index: int, num_settings: int) -> CaseResult:
    arrivals = day_and_bursts()[index].arrivals(np.random.default_rng(scenario.seed))
    return trace_case(scenario, num_gpus, arrivals).play(num_settings)


def _trace(scenario: AutoscaleScenario, num_gpus: int, path: Path, num_settings: int) -> CaseResult:
    return trace_case(scenario, num_gpus, trace(path)).play(num_settings)


def _week(
    scenario: AutoscaleScenario, num_gpus: int, rates: Path, model: str, lengths: Path, num: int, days: float | None
) -> CaseResult:
    name = f"rates-{model}"
    return rates_case(scenario, num_gpus, name, list(read_rates(rates)[model]), trace(lengths), days).play(num)


def _over_serve(result: CaseResult) -> float:
    return result.ours.gpu_h / result.serve_same.outcome.gpu_h


def _over_serve_at_goal(result: CaseResult, goal: float) -> float:
    found = [result.played[name] for name in (SERVE, SERVE_DRAFTING) if name in result.played]
    return result.ours.gpu_h / best(found, goal).outcome.gpu_h


def _mean_ratio(ratios: Sequence[float]) -> float:
    return exp(fmean(log(ratio) for ratio in ratios))


def _study(
    scenario: AutoscaleScenario,
    results: Sequence[CaseResult],
    followed: Sequence[Following],
    real_s: float,
    data: Path | None,
) -> Study:
    goal, price = scenario.attainment, scenario.dollars_per_gpu_hour
    ratios = [_over_serve(one) for one in results]
    at_goal = [_over_serve_at_goal(one, goal) for one in results]
    same = [one.serve_same.outcome.attainment for one in results]
    figures = {
        "slo_attainment.min": min(one.ours.attainment for one in results),
        "slo_attainment.mean": fmean(one.ours.attainment for one in results),
        "cost_over_serve_default": _mean_ratio(ratios),
        "cost_over_serve_default.max": max(ratios),
        "cost_over_serve_default.at_goal": _mean_ratio(at_goal),
        "serve_default_attains_as_much": fmean(s >= one.ours.attainment for s, one in zip(same, results, strict=True)),
        "cost_over_fixed": _mean_ratio([one.ours.gpu_h / one.played[FIXED].outcome.gpu_h for one in results]),
        "drafter_follow_s": max(one.lacking_s for one in followed),
        "drafter_surplus_s": max(one.surplus_s for one in followed),
        "num_cases": float(len(results)),
    }
    for one, ratio in zip(results, ratios, strict=True):
        name = f"{one.trace}.{one.num_gpus}"
        figures[f"slo_attainment.{name}"] = one.ours.attainment
        figures[f"cost_over_serve_default.{name}"] = ratio
        figures[f"dollars_per_million_tokens.{name}"] = 1e6 * price * one.ours.gpu_h / max(1.0, one.ours.num_tokens)
    made = "made-up arrivals" if data is None else "arrivals of the folder of data"
    notes = (
        f"simulated as a fluid, {made}; every policy but ours is tuned in hindsight to each trace and fleet",
        f"played in {real_s:.0f} s",
    )
    return Study("autoscale", figures, _tables(results, ratios, at_goal, price), _panels(results, ratios), notes)


def _tables(
    results: Sequence[CaseResult], ratios: Sequence[float], at_goal: Sequence[float], price: float
) -> tuple[StudyTable, ...]:
    rows: list[tuple[Cell, ...]] = []
    for one, ratio, goal_ratio in zip(results, ratios, at_goal, strict=True):
        ours, serve = one.ours, one.serve_same
        dollars = 1e6 * price * ours.gpu_h / max(1.0, ours.num_tokens)
        rows.append(
            (
                f"{one.trace}, {one.num_gpus} GPUs",
                f"{ours.attainment:.4f}",
                f"{ours.target_gpu_h:.1f} + {ours.drafter_gpu_h:.1f}",
                f"{serve.outcome.attainment:.4f}",
                f"{serve.outcome.gpu_h:.1f}",
                ratio,
                goal_ratio,
                dollars,
            )
        )
    columns = (
        "trace and fleet",
        "SLO",
        "GPU-h of targets + drafters",
        "Serve's SLO",
        "its GPU-h",
        "ours / Serve's",
        "at goal",
        "$ / M tokens",
    )
    every: list[tuple[Cell, ...]] = []
    for policy in POLICIES:
        found = [(one.played[policy].outcome, one.ours) for one in results if policy in one.played]
        if found:
            over = _mean_ratio([theirs.gpu_h / ours.gpu_h for theirs, ours in found])
            least = min(theirs.attainment for theirs, _ in found)
            every.append((policy, least, fmean(theirs.attainment for theirs, _ in found), over))
    return (
        StudyTable("Ours, and Serve's default tuned to the same attainment", columns, tuple(rows)),
        StudyTable("Every policy, tuned to the goal", ("policy", "least SLO", "mean SLO", "GPU-h over ours"), tuple(every)),
    )


def _panels(results: Sequence[CaseResult], ratios: Sequence[float]) -> tuple[Panel, ...]:
    names = tuple(f"{one.trace[:12]}\n{one.num_gpus}" for one in results)
    panels = [
        Panel("GPU hours over Serve's default, same attainment", {"ours": ([], ratios)}, y="ratio", labels=names),
        Panel("requests within both objectives", {"ours": ([], [one.ours.attainment for one in results])}, labels=names),
    ]
    for one in results:
        samples = one.ours.samples
        hours = [sample.at_s / 3600.0 for sample in samples]
        series: dict[str, tuple[Sequence[float], Sequence[float]]] = {
            "GPUs paid": (hours, [sample.num_gpus for sample in samples]),
            "targets ready": (hours, [float(sample.num_targets) for sample in samples]),
            "drafters ready": (hours, [float(sample.num_drafters) for sample in samples]),
        }
        panels.append(Panel(f"{one.trace}, {one.num_gpus} GPUs", series, x="hours"))
    return tuple(panels)
