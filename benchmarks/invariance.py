"""Equal tokens under any drafting, and under faults of drafters and batches.

Every prompt runs at temperature 0 and at 0.8 with a seed, in fp32 or ``--dtype``: once without drafters, and once in each
scenario, which is compared with the former token by token.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from rich.console import Console

from benchmarks.comparison import TIE_MARGIN, RunComparison, Verdict, compare
from benchmarks.fault_injection import TruncatedDrafter, truncate_by_content
from benchmarks.harness import DRAFT_LEN, PATIENT, PRECIOUS_ROWS, Harness, Run, RunConditions
from benchmarks.made_drafters import under_another_vocabulary, write_reader
from benchmarks.pool import pool as comparable
from benchmarks.prompts import choose_prompts
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from cluster.config import (
    DEFAULT_DRAFTERS,
    DrafterConfig,
    DraftLengthConfig,
    HiddenStateKind,
    HiddenStateOptions,
    ModelOptions,
    VllmOptions,
)
from cluster.types import Request
from drafters.protocol import Drafter
from engine.vllm.environment import RUNNER_V2
from router.drafting.policies import OVERLAP_POLICIES, VERIFICATION_POLICIES

NUM_PROMPTS, NUM_PROMPTS_QUICK = 40, 12
NUM_TOKENS, NUM_TOKENS_QUICK = 48, 24
SMALL_BATCH = 5
SELF = "itself"
DRAFT_LENGTHS: tuple[DraftLengthConfig, ...] = (
    DraftLengthConfig(kind="fixed"),
    DraftLengthConfig(kind="threshold"),
    DraftLengthConfig(kind="adaspec"),
    DraftLengthConfig(kind="faser"),
    DraftLengthConfig(kind="turbospec"),
)  # beside the default, by which other scenarios draft


@dataclass(frozen=True, slots=True)
class ScenarioOutcome:
    """Results of a scenario, one comparison per request."""

    scenario: str
    run: Run
    comparisons: list[RunComparison]
    seconds: float

    def count(self, verdict: Verdict) -> int:
        return sum(comparison.verdict is verdict for comparison in self.comparisons)

    @property
    def num_proposed(self) -> int:
        return sum(completion.num_proposed for completion in self.run.completions)

    @property
    def num_accepted(self) -> int:
        return sum(completion.num_accepted for completion in self.run.completions)

    @property
    def acceptance_before_end(self) -> float:
        """Over rounds after which a sequence continued: drafts beyond its end are no evidence."""
        commits = [c for completion in self.run.completions for c in completion.commits if c.finish is None]
        return sum(c.num_accepted for c in commits) / max(1, sum(c.num_proposed for c in commits))

    def row(self) -> tuple[Cell, ...]:
        verdicts = (self.count(verdict) for verdict in Verdict)
        done = "yes" if self.run.as_intended else "NO"
        return (self.scenario, *verdicts, self.num_proposed, self.num_accepted, done, round(self.seconds, 1))


def run(options: BenchOptions) -> BenchResult:
    """Figures: ``identical_fraction``, ``tie_fraction``, ``self_draft_acceptance``, and ``as_meant_fraction``: the share
    of scenarios in which drafts were verified and the fault occurred, without which they show nothing. With vLLM also
    ``identical_fraction.v1`` and ``.v2``, by model runner, and the lower of them, unless the environment names one."""
    if options.engine != "vllm" or RUNNER_V2 in os.environ:
        return _run(options)
    os.environ[RUNNER_V2] = "0"
    own, other = _run(options), _on_runner_v2(options)
    by_runner = {name: one["identical_fraction"] for name, one in (("v1", own.figures), ("v2", other["figures"]))}
    figures = {f"identical_fraction.{name}": value for name, value in by_runner.items()}
    figures = {**own.figures, "identical_fraction": min(by_runner.values()), **figures}
    return replace(own, figures=figures, notes=(*own.notes, *other["notes"]))


def _on_runner_v2(options: BenchOptions) -> dict[str, Any]:
    """A result as JSON; vLLM decides about its model runner when it is imported, so of a process of its own."""
    command = [sys.executable, "-m", "deploy.cli", "bench", "invariance", "--engine", "vllm", "--model", options.model]
    command += [f"--prompts={path}" for path in options.prompts] + ["--quick"] * options.quick
    with TemporaryDirectory() as folder:
        file = Path(folder, "result.json")  # Triton's leaks at exit would be among what is printed
        subprocess.run([*command, "--json", str(file)], env=os.environ | {RUNNER_V2: "1"}, check=True)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def _run(options: BenchOptions) -> BenchResult:
    num_prompts, num_tokens = (NUM_PROMPTS_QUICK, NUM_TOKENS_QUICK) if options.quick else (NUM_PROMPTS, NUM_TOKENS)
    if options.engine == "vllm" and os.environ.get(RUNNER_V2) == "1":
        num_prompts //= 4  # its kernels are interpreted
    prompts = [p.text for p in choose_prompts(options.prompts, num_prompts)]
    rig = Harness(options.model, prompts, num_tokens, options.engine, options.dtype or "float32")
    console = Console(stderr=True)
    plain = rig.run(RunConditions(prefix_cache=False))
    outcomes = []
    with TemporaryDirectory() as made:
        for name, circumstances in scenarios(rig, options.model, Path(made)).items():
            console.print(f"invariance: {name}", highlight=False)
            start_s = time.monotonic()
            ran = rig.run(circumstances)
            seconds = time.monotonic() - start_s
            pairs = zip(rig.requests, plain.completions, ran.completions, strict=True)
            outcomes.append(ScenarioOutcome(name, ran, [compare(r, a.commits, b.commits) for r, a, b in pairs], seconds))
    return result(rig.requests, outcomes)


def scenarios(rig: Harness, model: str, made: Path) -> Mapping[str, RunConditions]:
    """Conditions by name: every drafter of the default pool and every shipped one alone, then faults. ``made``: a folder
    for drafters that are made here.

    Faults use drafters that are mostly right, since dropping a wrong draft shows little.
    """
    own = DrafterConfig(name=SELF, options=ModelOptions(model=model, dtype="float32", kv_cache_gb=1.0))
    half = DrafterConfig(name="model", options=ModelOptions(model=model, dtype="bfloat16"))
    models: dict[str, Drafter] = {}

    def make(config: DrafterConfig) -> Drafter:
        """Loads models once, and makes lookups anew, which would remember the last scenario."""
        if not config.has_model:
            return rig.make(config)
        if config.name not in models:
            models[config.name] = rig.make(config)
        return models[config.name]

    def pool(*configs: DrafterConfig) -> Callable[[], Mapping[str, Drafter]]:
        return lambda: {config.name: make(config) for config in configs}

    def cut(num_kept: Callable[[Sequence[int]], int]) -> Callable[[], Mapping[str, Drafter]]:
        return lambda: {SELF: TruncatedDrafter(make(own), num_kept)}

    def alone(config: DrafterConfig) -> RunConditions:
        return RunConditions(companions=(config,)) if config.is_colocated else RunConditions(pool(config))

    def reader(kind: HiddenStateKind) -> DrafterConfig:
        path = str(write_reader(made / kind, kind, rig.folder))
        return DrafterConfig(name=kind, options=HiddenStateOptions(kind=kind, path=path, dtype="float32", min_survival=0.0))

    def apart(config: DrafterConfig) -> RunConditions:
        return RunConditions(companions=(config.model_copy(update={"remote": True}),))

    others = [*beyond_defaults(model), reader("eagle3")]
    # Those whose stages and heads drafters with every row share.
    more = [reader(kind) for kind in get_args(HiddenStateKind) if kind not in [config.name for config in others]]
    hosted = VllmOptions(speculative={"method": "eagle3", "model": str(made / "eagle3")})
    proposers = [DrafterConfig(name="vllm", options=hosted)] if rig.has_proposers else []
    colocated = [config for config in others if config.is_colocated]
    two_ranks = {f"two ranks, {config.name}": replace(alone(config), num_ranks=2) for config in colocated}
    readers = [config for config in colocated if isinstance(config.options, HiddenStateOptions)]
    remote = {f"remote {one.name}": apart(one) for one in readers}
    reading = {one.name: alone(one) for one in readers} | remote
    losing = {f"{name}, a rank dies": replace(one, num_ranks=2, lose_rank=True) for name, one in reading.items()}
    lanes = {f"{one.name} in a lane": replace(alone(one), divided=True) for one in colocated}
    rng = random.Random(0)
    mixed = pool(*DEFAULT_DRAFTERS, half)
    return {
        "no drafts, small batches": RunConditions(max_num_sequences=SMALL_BATCH),
        **{config.name: RunConditions(pool(config)) for config in (*DEFAULT_DRAFTERS, half)},
        **{f"pool's {config.name}": alone(config) for config in (*others, *more, *proposers)},
        **planning(mixed),
        **(remote | {f"remote {one.name}": apart(one) for one in more}),
        **{f"{name}, tensor link cut": replace(one, cut=True) for name, one in remote.items()},
        **(lanes if rig.has_lanes else {}),
        **(losing if rig.has_ranks else {}),
        "other vocabulary": RunConditions(lambda: {"other": under_another_vocabulary(rig.folder, rig.info)}),
        SELF: RunConditions(pool(own)),
        "random lengths": RunConditions(cut(lambda token_ids: rng.randint(0, len(token_ids)))),
        "adversary": RunConditions(cut(truncate_by_content)),
        "drafter killed": RunConditions(mixed, kill=half.name, successor=lambda: rig.make(half)),
        **({"two ranks": RunConditions(mixed, num_ranks=2)} | two_ranks if rig.has_ranks else {}),
        "half preempted": RunConditions(mixed, prefix_cache=False, preempt=True),
        **{
            f"half preempted, {config.name}": replace(alone(config), prefix_cache=False, preempt=True)
            for config in colocated
        },
    }


def planning(drafters: Callable[[], Mapping[str, Drafter]]) -> dict[str, RunConditions]:
    """Conditions for every policy of the planner that other scenarios lack."""
    plain = RunConditions(drafters)
    verified = replace(plain, draft_length=DraftLengthConfig(kind="fixed", num_tokens=DRAFT_LEN), cost=PRECIOUS_ROWS)
    verify = [name for name in VERIFICATION_POLICIES if name != PATIENT.verification]
    overlap = [name for name in OVERLAP_POLICIES if name != PATIENT.overlap]
    return {
        **{f"draft_length {config.kind}": replace(plain, draft_length=config) for config in DRAFT_LENGTHS},
        **{f"verify {name}": replace(verified, planner=replace(PATIENT, verification=name)) for name in verify},
        **{f"overlap {name}": replace(plain, planner=replace(PATIENT, overlap=name)) for name in overlap},
    }


def beyond_defaults(model: str) -> list[DrafterConfig]:
    """The drafters of `outrider bench drafters` that are not in the default pool."""
    return [config for config in comparable(model) if config not in DEFAULT_DRAFTERS]


def result(requests: list[Request], outcomes: list[ScenarioOutcome]) -> BenchResult:
    num_runs = sum(len(outcome.comparisons) for outcome in outcomes)
    num_ties = sum(outcome.count(Verdict.TIE) for outcome in outcomes)
    num_equal = sum(outcome.count(Verdict.EQUAL) for outcome in outcomes)
    own = next(outcome for outcome in outcomes if outcome.scenario == SELF)
    return BenchResult(
        bench="invariance",
        figures={
            "identical_fraction": (num_equal + num_ties) / num_runs,
            "tie_fraction": num_ties / num_runs,
            "self_draft_acceptance": own.acceptance_before_end,
            "as_meant_fraction": sum(outcome.run.as_intended for outcome in outcomes) / len(outcomes),
            "num_runs": num_runs,
        },
        tables=(
            Table(
                f"{len(requests)} requests a scenario, each against its plain run",
                ("scenario", *Verdict, "proposed", "accepted", "as meant", "seconds"),
                tuple(outcome.row() for outcome in outcomes),
            ),
        ),
        notes=tuple(_unequal(requests, outcomes)),
    )


def _unequal(requests: list[Request], outcomes: Iterable[ScenarioOutcome]) -> Iterable[str]:
    """Where differing runs diverge."""
    for outcome in outcomes:
        for request, comparison in zip(requests, outcome.comparisons, strict=True):
            if comparison.verdict is not Verdict.EQUAL:
                yield f"{outcome.scenario}, request {request.id}: {comparison}; a tie is at most {TIE_MARGIN}"
