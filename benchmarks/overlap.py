"""``outrider bench overlap``: drafting beside verification, over drafting before it; live, and at the costs of GPUs.

Three servers differ in `planner.overlap` alone: ``off`` waits for every draft (``barrier``), ``on`` verifies each draft
where it is (``frontier``), ``auto`` is the default. Target and drafter, the first layers of the target, are processes with
disjoint cores. The servers take turns, every other round backwards, with the same prompts; the others are suspended.

Figures: ``on_over_off.N`` and ``auto_over_off.N`` for N streams, tokens per second, with ``.se``, the relative standard
error; ``auto_over_off``: the least of them; ``simulated.*``: as of `benchmarks.overlap_simulated`.
"""

import asyncio
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.arms import Ratio
from benchmarks.compare.arms import OUTRIDER, POOL, Arm
from benchmarks.compare.systems import RunningArm
from benchmarks.compare.turns import closed_loop
from benchmarks.load import HttpTarget, LoadRequest
from benchmarks.overlap_simulated import simulated
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.serve import local_config, tokenize, with_state
from benchmarks.server import ServerProcess
from cluster.config import Config, DrafterConfig, ModelOptions, PolicyConfig, Resources, RouterConfig
from engine.models.prepare import ensure_model

OFF, ON, AUTO = "off", "on", "auto"
RULES = {OFF: "barrier", ON: "frontier", AUTO: "gain"}
STREAMS = (1, 4)
NUM_ROUNDS, NUM_ROUNDS_QUICK = 16, 4
MAX_TOKENS = 64
NUM_LAYERS = 10  # of the drafter
DRAFTER = "model"


def run(options: BenchOptions) -> BenchResult:
    num_rounds = NUM_ROUNDS_QUICK if options.quick else NUM_ROUNDS
    files, num = options.prompts or options.data_prompts, (num_rounds + 1) * sum(STREAMS)
    prompts = iter(asyncio.run(tokenize(Path(ensure_model(options.model)), files, num)))
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    with ExitStack() as stack:
        arms = {name: stack.enter_context(_running(name, options.model)) for name in RULES}
        for num_streams in STREAMS:
            speeds: dict[str, list[float]] = {name: [] for name in RULES}
            for number in range(num_rounds + 1):  # the first warms up
                asks = [LoadRequest(f"{number}-{i}", next(prompts), MAX_TOKENS) for i in range(num_streams)]
                for name in list(RULES)[:: 1 if number % 2 else -1]:
                    speeds[name].append(closed_loop(arms[name], asks, num_streams).tokens_per_s)
            ratios = {name: ratio(speeds[name][1:], speeds[OFF][1:]) for name in (ON, AUTO)}
            for name, found in ratios.items():
                figures |= {f"{name}_over_off.{num_streams}": found.value, f"{name}_over_off.{num_streams}.se": found.error}
                rows.append((num_streams, RULES[name], found.value, found.error))
            Console(stderr=True).print(f"overlap: {num_streams} streams, {num_rounds} rounds", highlight=False)
    figures["auto_over_off"] = min(figures[f"auto_over_off.{num}"] for num in STREAMS)
    told, table = simulated()
    live = Table("tokens per second over those of a barrier", ("streams", "overlap", "over barrier", "error"), tuple(rows))
    return BenchResult("overlap", figures | told, (live, table))


def ratio(speeds: Sequence[float], others: Sequence[float]) -> Ratio:
    return Ratio.of([math.log(ours / theirs) for ours, theirs in zip(speeds, others, strict=True)])


@contextmanager
def _running(name: str, model: str) -> Iterator[RunningArm]:
    """Suspended; its target and its drafter have each half of the cores."""
    with (
        tempfile.TemporaryDirectory(prefix="outrider-overlap-") as folder,
        ServerProcess(with_state(with_drafter(local_config(model), RULES[name]), Path(folder))) as server,
    ):
        cores = sorted(os.sched_getaffinity(0))
        half = max(1, len(cores) // 2)
        for actor, own in (("TargetActor", cores[:half]), ("DrafterActor", cores[half:] or cores)):
            for process in server.workers(actor):
                _confine(process, own)
        api = server.config.api
        server.suspend()
        try:
            yield RunningArm(Arm(OUTRIDER, "bf16", POOL), HttpTarget(api.host, api.port, model), server, server.last_words)
        finally:
            server.resume()


def with_drafter(config: Config, overlap: str) -> Config:
    """All requests draft with the first layers of the target. Each process has a thread for each of its cores."""
    threads = Resources(cpus=0.3, gpus=0, threads=max(1, len(os.sched_getaffinity(0)) // 2))
    options = ModelOptions(model=config.model.name, num_layers=NUM_LAYERS)
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"resources": threads}),
            "drafters": (DrafterConfig(name=DRAFTER, options=options, resources=threads),),
            "router": RouterConfig(policy=PolicyConfig(kind="fixed", chain=(DRAFTER,))),
            "planner": config.planner.model_copy(update={"overlap": overlap}),
        }
    )


def _confine(process: psutil.Process, cores: Sequence[int]) -> None:
    """All its threads, and those that they start."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)
