"""``outrider bench overlap``: drafting beside verification, over drafting before it; live, and at the costs of GPUs.

Three servers differ in `planner.overlap` alone: ``off`` waits for every draft (``barrier``), ``on`` verifies each draft
where it is (``frontier``), ``auto`` is the default. Target and drafter, which has the target's weights, are processes with
disjoint cores: with drafts that are mostly wrong there is nothing to overlap. Three others have the default cascade in the
target's process, and differ in `target.partition` alone; each has its profile. The servers take turns,
every other round backwards, with the same prompts; the others are suspended.

Figures: ``on_over_off.N`` and ``auto_over_off.N`` for N streams, tokens per second, with ``.se``, the relative standard
error; ``auto_over_off``: the least of them; ``partition.*``: the same of the partition; ``simulated.*``: as of
`benchmarks.overlap_simulated`.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
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
from cluster.config import Config, DrafterConfig, DraftLengthConfig, ModelOptions, PolicyConfig, Resources, RouterConfig
from cluster.state import open_store
from deploy.local_ray import free_port
from deploy.profiling import ProfileEffort, measure_profile
from engine.cpu_setup import in_own_thread
from engine.loading import prepare_partition
from engine.models.prepare import ensure_model
from profiler.interleaved import TimingBudget
from profiler.profile import save_profile

OFF, ON, AUTO = "off", "on", "auto"
RULES = {OFF: "barrier", ON: "frontier", AUTO: "gain"}
STREAMS = (1, 4)
NUM_ROUNDS, NUM_ROUNDS_QUICK = 16, 4
MAX_TOKENS = 64
DRAFTER = "model"
LENGTH = DraftLengthConfig(kind="fixed")  # the default asks for none where drafts do not pay, and then nothing overlaps
_PROFILE = ProfileEffort(TimingBudget(2, 15.0, precision=0.1), max_rows=64, max_batch=4)


def run(options: BenchOptions) -> BenchResult:
    num_rounds, files = NUM_ROUNDS_QUICK if options.quick else NUM_ROUNDS, options.prompts or options.data_prompts
    prompts = tokenize(Path(ensure_model(options.model)), files, (num_rounds + 1) * sum(STREAMS))
    config = local_config(options.model)
    configs = {name: with_drafter(config, rule) for name, rule in RULES.items()}
    figures, live = _compared("", "overlap", configs, prompts, num_rounds)
    divided, lanes = _compared("partition.", "partition", with_partitions(config), prompts, num_rounds)
    told, table = simulated()
    return BenchResult("overlap", figures | divided | told, (live, lanes, table))


def _compared(
    prefix: str, subject: str, configs: Mapping[str, Config], prompts: Sequence[tuple[int, ...]], num_rounds: int
) -> tuple[dict[str, float], Table]:
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    asked = iter(prompts)
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-overlap-")))
        arms = {name: stack.enter_context(_running(with_state(one, state / name))) for name, one in configs.items()}
        for num_streams in STREAMS:
            speeds: dict[str, list[float]] = {name: [] for name in configs}
            for number in range(num_rounds + 1):  # the first warms up
                asks = [LoadRequest(f"{number}-{i}", next(asked), MAX_TOKENS) for i in range(num_streams)]
                for name in list(configs)[:: 1 if number % 2 else -1]:
                    speeds[name].append(closed_loop(arms[name], asks, num_streams).tokens_per_s)
            ratios = {name: ratio(speeds[name][1:], speeds[OFF][1:]) for name in (ON, AUTO)}
            for name, found in ratios.items():
                figures |= {(key := f"{prefix}{name}_over_off.{num_streams}"): found.value, f"{key}.se": found.error}
                rows.append((num_streams, name, found.value, found.error))
            Console(stderr=True).print(f"{subject}: {num_streams} streams, {num_rounds} rounds", highlight=False)
    figures[f"{prefix}auto_over_off"] = min(figures[f"{prefix}auto_over_off.{num}"] for num in STREAMS)
    title = f"{subject}: tokens per second over those of off"
    return figures, Table(title, ("streams", "arm", "over off", "error"), tuple(rows))


def ratio(speeds: Sequence[float], others: Sequence[float]) -> Ratio:
    return Ratio.of([math.log(ours / theirs) for ours, theirs in zip(speeds, others, strict=True)])


@contextmanager
def _running(config: Config) -> Iterator[RunningArm]:
    """Suspended; its target and a drafter in another process have each half of the cores."""
    if any(drafter.is_colocated for drafter in config.drafters):
        _profile(config)
    config = config.model_copy(update={"api": config.api.model_copy(update={"port": free_port()})})
    with ServerProcess(config) as server:
        cores = sorted(os.sched_getaffinity(0))
        half = max(1, len(cores) // 2)
        if server.workers("DrafterActor"):
            for actor, own in (("TargetActor", cores[:half]), ("DrafterActor", cores[half:] or cores)):
                for process in server.workers(actor):
                    _confine(process, own)
        api, name = config.api, config.model.public_names[0]
        server.suspend()
        try:
            must_draft = bool(server.workers("DrafterActor"))  # in the target's process they are made where they pay
            yield RunningArm(Arm(OUTRIDER, "bf16", POOL), HttpTarget(api.host, api.port, name), server, must_draft)
        finally:
            server.resume()


def with_drafter(config: Config, overlap: str) -> Config:
    """All requests draft with the target's own weights. Each process has a thread for each of its cores."""
    threads = Resources(cpus=0.3, gpus=0, threads=max(1, len(os.sched_getaffinity(0)) // 2))
    options = ModelOptions(model=config.model.name)
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"resources": threads}),
            "drafters": (DrafterConfig(name=DRAFTER, options=options, resources=threads),),
            "router": RouterConfig(policy=PolicyConfig(kind="fixed", chain=(DRAFTER,))),
            "planner": config.planner.model_copy(update={"overlap": overlap, "draft_length": LENGTH}),
        }
    )


def with_partitions(config: Config) -> dict[str, Config]:
    """All requests draft with the cascade in the target's process."""
    colocated = tuple(drafter for drafter in config.drafters if drafter.is_colocated)
    fixed = RouterConfig(policy=PolicyConfig(kind="fixed", chain=(colocated[0].name,)))
    return {
        name: config.model_copy(
            update={
                "target": config.target.model_copy(update={"partition": name}),
                "drafters": colocated[:1],
                "router": fixed,
            }
        )
        for name in (OFF, ON, AUTO)
    }


def _profile(config: Config) -> None:
    """Stores what `outrider profile` would, with fewer visits."""
    with closing(open_store(config.cluster.state, config.cluster.namespace)) as store:
        partition = prepare_partition(config)
        for split in (None, *(() if partition is None else partition.splits)):
            save_profile(store, in_own_thread(partial(measure_profile, config, _PROFILE, split=split)))


def _confine(process: psutil.Process, cores: Sequence[int]) -> None:
    """All its threads, and those that they start."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)
