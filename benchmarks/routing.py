"""``outrider bench routing``: assignment policies on recorded agreement, on a virtual clock.

Costs are those measured on this machine (``.cpu``), and of two scenarios on GPUs (``.h100-32b``, ``.a100-70b``:
`benchmarks.routing_costs`). Goodput is committed tokens per second, relative to

- every request with its best drafter: ``goodput_over_hindsight``;
- all requests with the single best drafter: ``goodput_over_best_single``. The possible gain is
  ``hindsight_over_best_single`` by choosing per request, and at most ``switching_oracle_over_best_single`` by choosing per
  round.

A cascade contains other drafters, so the pool with it is compared separately, under ``all.``. ``order_holds``: 1 if `hedge`
is before `lbss` and that before `epsilon-greedy`. Figures without a cost's name are those of this machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.pool import pool
from benchmarks.record import DEFAULT_PATH, record
from benchmarks.report import BenchOptions, BenchResult, Cell, Table, describe_environment
from benchmarks.routing_costs import gpu_costs
from cluster.config import (
    Config,
    DrafterConfig,
    EpsilonGreedyPolicy,
    GreedyLengthPolicy,
    HedgePolicy,
    LbssPolicy,
    ModelConfig,
    PolicyConfig,
    Resources,
    TargetConfig,
    lookups_in_pool,
)
from cluster.resolve import resolve
from deploy.profile_command import here
from profiler.profile import ProfiledCost
from router.cost_model import CostModel
from router.planning.planner import StepPlanner
from simulator.agreement import SimulatedRequest
from simulator.plots import Panel, plot
from simulator.policy_comparison import Contest, compete, endless, regret
from simulator.recording import AgreementRecording, read_recording
from simulator.simulation import ClusterSpec, DrafterSpec
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass

ORDER: dict[str, PolicyConfig] = {"hedge": HedgePolicy(), "lbss": LbssPolicy(), "epsilon-greedy": EpsilonGreedyPolicy()}
POLICIES: dict[str, PolicyConfig] = {
    **ORDER,
    **{f"epsilon-greedy-{epsilon:g}": EpsilonGreedyPolicy(epsilon=epsilon) for epsilon in (0.02, 0.3)},
    "greedy-length": GreedyLengthPolicy(),
}
CPU = "cpu"
COMBINATIONS = ("cascade",)
CONCURRENCY = 4
NUM_REQUESTS = 1200  # the recording is repeated in random orders
NUM_QUICK = 200
NUM_ENDLESS = 16  # endless requests, for regret over time
ENDLESS_S = 1800.0
ENDLESS_QUICK_S = 240.0
PLOT = Path("outrider-routing.png")


def run(options: BenchOptions) -> BenchResult:
    path = options.recording or DEFAULT_PATH
    if not path.exists():
        record(options).save(path)
    recording = read_recording(path)
    configs = [config for config in pool(options.model) if config.name in recording.header.drafters]
    cost = measured_cost(options.model, configs)
    return compare(recording, configs, {CPU: cost, **gpu_costs(cost, configs)}, options.quick, PLOT)


def measured_cost(model: str, configs: Sequence[DrafterConfig]) -> CostModel:
    """From the machine's stored profile (`outrider profile`), otherwise measured now."""
    config = resolve(
        Config(
            model=ModelConfig(name=model),
            target=TargetConfig(resources=Resources(threads=describe_environment().num_threads)),
            drafters=tuple(configs),
        ),
        here(),
    )
    from deploy.profiling import ProfileEffort, measure_profile
    from engine.loading import stored_profile

    stored = stored_profile(config)
    if stored is not None:
        cost = ProfiledCost(stored, config)
        if all(cost.draft_s(one.name, 1, one.max_draft_len) is not None for one in configs):
            return cost
    return ProfiledCost(measure_profile(config, ProfileEffort.of(quick=True)), config)


def compare(
    recording: AgreementRecording,
    configs: Sequence[DrafterConfig],
    costs: Mapping[str, CostModel],
    quick: bool,
    picture: Path,
) -> BenchResult:
    """``costs``: by name; CPU is among them."""
    console = Console(stderr=True)
    parts = [config for config in configs if config.options.kind not in COMBINATIONS]
    requests = drawn(recording, NUM_QUICK if quick else NUM_REQUESTS)
    figures: dict[str, float] = {}
    tables = []
    for prefix, chosen in (("", parts), ("all.", list(configs))):
        if prefix and len(chosen) == len(parts):
            continue
        for name, cost in costs.items():
            console.print(f"routing: {name}, {len(requests)} requests, {', '.join(c.name for c in chosen)}", highlight=False)
            contest = compete(cluster(chosen, cost), POLICIES, requests, CONCURRENCY, with_oracle=True)
            found = contest.figures(prefix)
            goodputs = [contest.policies[policy].goodput for policy in ORDER]
            found[f"{prefix}order_holds"] = float(goodputs == sorted(goodputs, reverse=True))
            figures |= {f"{key}.{name}": value for key, value in found.items()}
            if name == CPU:
                figures |= found
            tables.append(_goodput_table(f"{name}, {'with cascades' if prefix else 'without cascades'}", contest))
    console.print("routing: regret", highlight=False)
    chosen_requests = [endless(request, 2**17) for request in drawn(recording, NUM_ENDLESS)]
    until_s = ENDLESS_QUICK_S if quick else ENDLESS_S
    lasting = compete(cluster(parts, costs[CPU]), POLICIES, chosen_requests, NUM_ENDLESS, until_s=until_s)
    curves = regret(lasting)
    draw(curves, picture)
    return BenchResult(
        "routing",
        figures,
        tables=(*tables, _regret_table(curves, until_s)),
        notes=(
            f"simulated, on recorded agreement of {len(recording)} answers of {recording.header.model}; {CONCURRENCY} "
            "requests at a time. Costs: cpu, measured here; others, a roofline of GPUs, their lookups as measured here.",
            f"regret: {NUM_ENDLESS} requests that never end, costs of cpu; drawn in {picture}.",
        ),
    )


def drawn(recording: AgreementRecording, num_requests: int, seed: int = 0) -> list[SimulatedRequest]:
    """The recordings in random order, repeatedly."""
    random = np.random.default_rng(seed)
    requests: list[SimulatedRequest] = []
    while len(requests) < num_requests:
        for number in random.permutation(len(recording)).tolist()[: num_requests - len(requests)]:
            requests.append(
                SimulatedRequest(
                    f"{len(requests)}:{recording.ids[number]}",
                    0.0,
                    int(recording.prompt_lens[number]),
                    int(recording.output_lens[number]),
                    recording.answer(number),
                    recording.domains[number],
                    tuple(recording.features[number].tolist()),
                )
            )
    return requests


def cluster(configs: Sequence[DrafterConfig], cost: CostModel) -> ClusterSpec:
    target = TargetConfig()
    config = Config()
    limits = TargetLimits(
        target.block_len,
        num_blocks=65_536,
        max_num_sequences=target.max_num_sequences,
        max_pass_tokens=target.longest_pass,
        max_model_len=2**20,
    )
    drafters = tuple(
        DrafterSpec(
            c.name,
            c.capacity,
            c.max_draft_len,
            c.ahead_len,
            c.replicas,
            c.is_colocated,
            lookups=lookups_in_pool(c, configs),
        )
        for c in configs
    )
    return ClusterSpec(
        cost,
        PackedPass(cost),
        DraftByCost(cost),
        limits,
        drafters,
        lambda: StepPlanner.of(config),
        slot_s=config.router.slot_ms / 1e3,
    )


def draw(curves: dict[str, tuple[np.ndarray, np.ndarray]], picture: Path) -> None:
    series = {kind: (at.tolist(), tokens.tolist()) for kind, (at, tokens) in curves.items()}
    plot(
        [
            Panel("regret", series, x="seconds", y="tokens missed"),
            Panel("regret, time in logarithm", series, x="seconds", y="tokens missed", log_x=True),
        ],
        "simulated: policies against the best drafter of each request",
        picture,
    )


def _goodput_table(title: str, contest: Contest) -> Table:
    best_single, hindsight = contest.best_single, contest.hindsight.goodput
    shares = {name: contest.best.count(name) / len(contest.best) for name in contest.single}
    rows: list[tuple[Cell, ...]] = []
    for name, outcome in {
        **{f"all with {name}": outcome for name, outcome in contest.single.items()},
        "best of each in hindsight": contest.hindsight,
        **({"best of each round": contest.oracle} if contest.oracle is not None else {}),
        **contest.policies,
    }.items():
        drafter = name.removeprefix("all with ")
        rows.append(
            (
                name,
                outcome.goodput,
                outcome.accepted_len,
                outcome.goodput / hindsight,
                outcome.goodput / contest.single[best_single].goodput,
                shares.get(drafter, "-"),
                sum(one.num_switches for one in outcome.served) / max(1, len(outcome.served)),
            )
        )
    columns = ("who", "tokens/s", "accepted length", "over hindsight", "over best single", "best for", "switches")
    return Table(f"simulated goodput: {title}", columns, tuple(rows))


def _regret_table(curves: dict[str, tuple[np.ndarray, np.ndarray]], until_s: float) -> Table:
    """Regret added by each doubling of the time: constant if it grows like log T, doubling if like T."""
    ends = [until_s / 2**k for k in range(5, -1, -1)]
    rows: list[tuple[Cell, ...]] = []
    for kind, (at, tokens) in curves.items():
        values = np.interp(ends, at, tokens)
        rows.append((kind, float(values[0]), *np.diff(values).tolist()))
    columns = ("policy", f"by {ends[0]:.3g} s", *(f"until {end:.4g} s" for end in ends[1:]))
    return Table("tokens missed, and what each doubling of the time adds", columns, tuple(rows))
