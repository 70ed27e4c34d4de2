"""A cluster under a stream of requests, with each policy in a run and a process of its own, and without drafting."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from csv import DictReader
from csv import Error as CsvError
from dataclasses import replace
from gzip import open as open_gzip
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from zlib import error as ZlibError

import numpy as np

from cluster.config import PolicyConfig, SloClass
from cluster.errors import InvalidField
from profiler.hardware import num_cores
from router.assignment import Scored
from router.drafter.policies import build_policy, scored_by
from router.planning.planner import PlannerSettings, StepPlanner
from simulator.agreement import AgreementAnswer, SimulatedRequest
from simulator.scenario import ServingScenario
from simulator.simulation import ClusterSpec, DrafterSpec, Load, SimulationResult, simulate
from simulator.study import Cell, Panel, Said, Study, Table
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass

BLOCK_LEN = 16
TARGET_ALONE = "target alone"


def run(scenario: ServingScenario, said: Said = lambda what: None) -> Study:
    policies: dict[str, PolicyConfig] = {TARGET_ALONE: PolicyConfig(kind="fixed", chain=())}
    policies |= {policy.kind: policy for policy in scenario.policies}
    begun_s = perf_counter()
    num_processes = min(len(policies), num_cores())
    said(f"{', '.join(policies)}; in {num_processes} processes")
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as processes:
        running = {name: processes.submit(_served, scenario, policy) for name, policy in policies.items()}
        for name, outcome in running.items():
            outcome.result()
            said(f"{name} is done")
        outcomes = {name: outcome.result() for name, outcome in running.items()}
    return _study(scenario, outcomes, perf_counter() - begun_s)


def _served(scenario: ServingScenario, policy: PolicyConfig) -> SimulationResult:
    spec = _cluster(scenario, scored_by(policy))
    outcome = simulate(spec, build_policy(policy), Load(requests(scenario)), scenario.seed)
    # Answers are what it was made of, and a thousand times as large as what came of it.
    without = AgreementAnswer(0, {})
    outcome.finished = [replace(one, request=replace(one.request, answer=without)) for one in outcome.finished]
    return outcome


def requests(scenario: ServingScenario) -> Iterator[SimulatedRequest]:
    """The same for every policy, in the order of their coming: each is made when its time has come."""
    random = np.random.default_rng(scenario.seed)
    kinds = list(scenario.texts.items())
    longest = max(drafter.max_draft_len for drafter in scenario.drafters.values())
    for number, (arrival_s, lens) in enumerate(_arrivals(scenario, random)):
        name, kind = kinds[int(random.integers(len(kinds)))]
        prompt_len, num_tokens = lens or (kind.prompt_len.draw(random), kind.output_len.draw(random))
        answer = kind.family.answer(random, num_tokens, longest)
        slo = kind.slo.objectives(name)
        yield SimulatedRequest(f"r{number}", arrival_s, prompt_len, num_tokens, answer, name, slo=slo)


def _arrivals(scenario: ServingScenario, random: np.random.Generator) -> Iterator[tuple[float, tuple[int, int] | None]]:
    """When, and how long prompt and answer are where a trace says so."""
    if scenario.trace is not None:
        for arrival_s, prompt_len, num_tokens in read_trace(scenario.trace):
            at_s = arrival_s / scenario.requests_per_s
            if at_s >= scenario.duration_s:
                return
            yield at_s, (min(prompt_len, scenario.max_prompt_len), min(num_tokens, scenario.max_output_len))
        return
    now_s = float(random.exponential(1.0 / scenario.requests_per_s))
    while now_s < scenario.duration_s:
        yield now_s, None
        now_s += float(random.exponential(1.0 / scenario.requests_per_s))


def read_trace(path: Path) -> Iterator[tuple[float, int, int]]:
    """Arrival, tokens of the prompt and of the answer, of each line of a CSV file (may be gzipped) with the columns
    arrival_s, prompt_tokens and output_tokens. Requests that got no answer are left out.

    Raises:
        InvalidField: it cannot be read, or a line is not so.
    """
    number, last_s = 1, 0.0
    try:
        with open_gzip(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for row in DictReader(file):
                number += 1
                arrival_s = float(row["arrival_s"])
                prompt_len, num_tokens = int(row["prompt_tokens"]), int(row["output_tokens"])
                if not arrival_s >= last_s:
                    raise ValueError("arrivals must not fall")
                last_s = arrival_s
                if prompt_len > 0 and num_tokens > 0:
                    yield arrival_s, prompt_len, num_tokens
    except OSError as error:
        raise InvalidField("trace", str(path), f"cannot be read ({error.strerror or error})") from error
    except (KeyError, TypeError, ValueError, EOFError, ZlibError, CsvError) as error:
        raise InvalidField("trace", f"{path}:{number}", f"is not as a trace is ({error})") from error


def _cluster(scenario: ServingScenario, scored: Scored) -> ClusterSpec:
    cost = scenario.cost(scenario.target)
    settings = PlannerSettings(max_hold_s=scenario.max_hold_ms / 1e3, max_chunk_len=scenario.max_pass_tokens)
    max_model_len = max(
        scenario.max_prompt_len + scenario.max_output_len,
        *(text.prompt_len.most + text.output_len.most for text in scenario.texts.values()),
    )
    return ClusterSpec(
        cost,
        PackedPass(cost),
        DraftByCost(cost),
        TargetLimits(
            BLOCK_LEN,
            cost.target.kv_tokens() // BLOCK_LEN,
            scenario.max_num_sequences,
            scenario.max_pass_tokens,
            max_model_len,
            max_waiting=4096,
        ),
        tuple(
            DrafterSpec(name, one.capacity, one.max_draft_len, replicas=one.replicas, verifies=one.verifies)
            for name, one in scenario.drafters.items()
        ),
        lambda: StepPlanner(settings),
        num_targets=scenario.num_targets,
        link_s=scenario.link_us * 1e-6,
        slot_s=scenario.slot_s,
        scored=scored,
        jitter=scenario.jitter,
        watches_drift=True,
    )


def _arriving(scenario: ServingScenario) -> str:
    if scenario.trace is None:
        return f"{scenario.requests_per_s:g} requests a second by chance"
    return f"requests as in {scenario.trace.name}, {scenario.requests_per_s:g} times as fast"


def _study(scenario: ServingScenario, outcomes: dict[str, SimulationResult], real_s: float) -> Study:
    num_gpus = scenario.num_targets * scenario.target.parallelism + sum(d.replicas for d in scenario.drafters.values())
    plain = outcomes[TARGET_ALONE]
    rows: list[tuple[Cell, ...]] = []
    classes: list[tuple[Cell, ...]] = []
    has_slo = any(text.slo != SloClass() for text in scenario.texts.values())
    figures: dict[str, float] = {"num_gpus": float(num_gpus)}
    for name, outcome in outcomes.items():
        ttft, tpot = outcome.ttft_s(), outcome.tpot_s()
        quantiles = [1e3 * float(np.quantile(values, q)) for values in (ttft, tpot) for q in (0.5, 0.99)]
        refused = len(outcome.finished) - len(outcome.served)
        rows.append(
            (
                name,
                len(outcome.served),
                refused,
                outcome.goodput,
                outcome.accepted_len,
                *quantiles,
                outcome.target_busy,
                outcome.num_rows / max(1, outcome.num_passes),
            )
        )
        key = name.replace(" ", "_")
        figures[f"goodput.{key}"] = outcome.goodput
        figures[f"tpot_p50_ms.{key}"] = quantiles[2]
        figures[f"tpot_speedup.{key}"] = float(np.mean(plain.tpot_s()) / np.mean(tpot))
        for counts in outcome.attainment().values() if has_slo else ():
            num_requests = counts.num_answers + counts.num_refused
            figures[f"slo_attainment.{key}.{counts.name}"] = counts.num_met / num_requests
            classes.append((name, counts.name, num_requests, counts.num_refused, counts.num_met / num_requests))
    simulated_s = sum(outcome.end_s for outcome in outcomes.values())
    columns = (
        "policy",
        "served",
        "refused",
        "tokens/s",
        "accepted length",
        "TTFT p50 ms",
        "p99",
        "TPOT p50 ms",
        "p99",
        "target busy",
        "rows a pass",
    )
    series = {}
    for name, outcome in outcomes.items():
        at = np.linspace(0.01, 0.99, 99)
        series[name] = ((1e3 * np.quantile(outcome.tpot_s(), at)).tolist(), at.tolist())
    return Study(
        "serving",
        figures,
        (
            Table(f"simulated: {num_gpus} GPUs, {scenario.num_targets} targets", columns, tuple(rows)),
            *([Table("objectives", ("policy", "class", "requests", "refused", "met"), tuple(classes))] if classes else []),
        ),
        (Panel("time per token", series, x="ms", y="share of requests"),),
        (
            f"simulated: costs by a roofline, acceptance by families, {_arriving(scenario)}.",
            f"{simulated_s / 3600:.2f} hours of {num_gpus} GPUs in {real_s:.0f} s.",
        ),
    )
