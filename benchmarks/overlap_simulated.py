"""Drafting ahead of several outcomes at the costs of a GPU, simulated (`outrider bench overlap`).

A target of 32B on two H100 and a drafter of 1.5B on another, by roofline; closed loops, drafts of DRAFT_LEN tokens.
"""

from dataclasses import replace

from benchmarks.policy_scenarios import Machine, Text, Workload, gpu_machine
from benchmarks.report import Cell, Table
from cluster.config import DraftLengthConfig
from router.drafter.seats import Fixed
from router.planning.planner import PlannerSettings, StepPlanner
from simulator.simulation import Simulation, SimulationResult

SCENARIO, DRAFTER = "h100-32b", "qwen-1.5b"
DRAFT_LEN = 4
MAX_OUTCOMES = 4
RUNNER_UP = 0.43  # as measured of a copy of the target: docs/measurements/overlap.md
BATCHES = (1, 4, 16)
NUM_TOKENS = 2000  # of plain decoding
ARMS = (("barrier", 0), ("frontier", 0), ("gain", 0), ("barrier", MAX_OUTCOMES), ("gain", MAX_OUTCOMES))


def simulated() -> tuple[dict[str, float], Table]:
    """Figures that begin with ``simulated``, and tokens per second over those of a barrier."""
    machine = gpu_machine(SCENARIO, DRAFTER)
    machine = replace(machine, texts=tuple(with_runners_up(text) for text in machine.texts))
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    for batch in BATCHES:
        found = [play(machine, Workload(f"batch {batch}", batch, NUM_TOKENS), *arm) for arm in ARMS]
        barrier = found[0][0].goodput
        ratios = [result.goodput / barrier for result, _ in found]
        figures[f"simulated.outcomes_over_barrier.batch_{batch}"] = ratios[-1]
        figures[f"simulated.gain_over_barrier.batch_{batch}"] = ratios[2]
        figures[f"simulated.hit_rate.batch_{batch}"] = found[-1][1]
        rows.append((batch, *ratios[1:], found[-1][1]))
    columns = ("batch", *(f"{overlap}, {num} outcomes" if num else overlap for overlap, num in ARMS[1:]), "hits")
    return figures, Table(f"simulated, {SCENARIO} with {DRAFTER}: over a barrier", columns, tuple(rows))


def play(machine: Machine, workload: Workload, overlap: str, max_outcomes: int) -> tuple[SimulationResult, float]:
    spec = machine.spec()
    settings = PlannerSettings("all", 1.0, overlap=overlap)
    spec = replace(
        spec,
        planner=lambda: StepPlanner(settings),
        draft_length=DraftLengthConfig(kind="fixed", num_tokens=DRAFT_LEN),
        drafters=tuple(replace(one, max_draft_len=DRAFT_LEN, max_outcomes=max_outcomes) for one in spec.drafters),
        sheds=False,
    )
    policy = Fixed((DRAFTER,))
    simulation = Simulation(spec, policy, workload.load(machine), until_s=workload.until_s(machine))
    result = simulation.run()
    counts = simulation.outcome_counts(DRAFTER)
    return result, 0.0 if counts is None else counts.hit_rate


def with_runners_up(text: Text) -> Text:
    assert text.family is not None
    one = text.family.drafters[DRAFTER].model_copy(update={"runner_up": RUNNER_UP})
    return replace(text, family=text.family.model_copy(update={"drafters": {DRAFTER: one}}))
