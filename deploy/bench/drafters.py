"""``outrider bench drafters``: what each drafter of the pool brings and costs, and how fast answers come with it.

Accepted lengths are held against recorded answers of the target, which is exact (``drafters.replay``), and always count the
bonus token. Draft costs and speed-ups are measured in this process, each beside the plain target in turn. Every measurement
gets a new drafter, for most learn while they serve.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from cluster.config import DrafterConfig
from cluster.types import Request, SamplingParams
from deploy.bench.pace import tokens_per_s
from deploy.bench.pool import pool
from deploy.bench.report import BenchOptions, BenchResult, Cell, Table
from deploy.bench.stable import Stable, TargetBehind, as_request
from drafters.protocol import Demand, Draft, Drafter
from drafters.replay import Recording, Round, replay
from engine.target import SpanInput
from profiler.calibration import Records
from profiler.online_calibration import OnlineSurvival
from profiler.prompts import Prompt, choose_prompts, load_prompts
from profiler.reliability import auroc, expected_calibration_error

DRAFT_LENS = (7, 4)
BATCHES = (1, 4, 8, 16)
TEMPERATURES = (0.0, 0.8)
MAX_PER_DOMAIN = 40
MIN_CASES = 30  # of a position before its calibration error means anything


@dataclass(frozen=True, slots=True)
class Effort:
    num_synthetic: int
    max_per_domain: int
    num_prompts: int | None  # in all; None: no bound
    num_new_tokens: int
    num_cost_rounds: int
    num_repeats: int
    num_alone: int  # requests of a run at batch 1
    temperatures: tuple[float, ...]  # of the speed-ups


QUICK = Effort(18, 2, 24, 32, 24, 2, 2, (0.0,))
FULL = Effort(120, MAX_PER_DOMAIN, None, 128, 120, 3, 6, TEMPERATURES)


@dataclass(slots=True)
class Findings:
    """Of one drafter."""

    rounds: dict[tuple[float, int], list[Round]] = field(default_factory=dict)  # by temperature and draft length
    costs: dict[int, float] = field(default_factory=dict)  # by draft length
    paces: dict[tuple[float, int], float] = field(default_factory=dict)  # speed-up by temperature and batch


def run(options: BenchOptions) -> BenchResult:
    effort = QUICK if options.quick else FULL
    console = Console(stderr=True)
    configs = pool(options.model)
    stable = Stable(options.model, configs, effort.num_new_tokens)
    prompts = _prompts(options, effort)
    console.print(f"drafters: recording answers to {len(prompts)} prompts", highlight=False)
    recordings = {temperature: stable.record(prompts, temperature) for temperature in TEMPERATURES}
    found = {config.name: Findings() for config in configs}
    for config in configs:
        console.print(f"drafters: {config.name}", highlight=False)
        for temperature, draft_len in itertools.product(TEMPERATURES, DRAFT_LENS):
            found[config.name].rounds[temperature, draft_len] = _accepted(stable, config, recordings[temperature], draft_len)
        for draft_len in DRAFT_LENS:
            cost = _draft_cost(stable, config, recordings[0.0], draft_len, effort.num_cost_rounds)
            found[config.name].costs[draft_len] = cost
    for temperature, batch in itertools.product(effort.temperatures, BATCHES):
        console.print(f"drafters: speed at batch {batch}, temperature {temperature}", highlight=False)
        for name, pace in _speedups(stable, configs, recordings[temperature], batch, effort).items():
            found[name].paces[temperature, batch] = pace
    return result(found, len(prompts), effort)


def _prompts(options: BenchOptions, effort: Effort) -> list[Prompt]:
    if not options.prompts:
        return choose_prompts((), effort.num_synthetic)
    if effort.num_prompts is not None:
        return choose_prompts(options.prompts, effort.num_prompts)
    return load_prompts(options.prompts, effort.max_per_domain)


def _accepted(stable: Stable, config: DrafterConfig, recordings: Sequence[Recording], draft_len: int) -> list[Round]:
    behind = TargetBehind(stable.target) if config.is_companion else None
    return list(replay(stable.make(config), recordings, draft_len, behind=behind))


# ---- what a draft costs


class _Timed:
    """A drafter whose drafts are timed, each beside a one-row step of the target."""

    def __init__(self, drafter: Drafter, step: Callable[[], None]) -> None:
        self._drafter, self._step = drafter, step
        self.open, self.extend, self.release = drafter.open, drafter.extend, drafter.release
        self.check_integrity = drafter.check_integrity
        self.draft_s: list[float] = []
        self.step_s: list[float] = []

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        start_s = time.perf_counter()
        drafts = self._drafter.propose(demands)
        middle_s = time.perf_counter()
        self._step()
        self.draft_s.append(middle_s - start_s)
        self.step_s.append(time.perf_counter() - middle_s)
        return drafts


def _draft_cost(
    stable: Stable, config: DrafterConfig, recordings: Sequence[Recording], draft_len: int, num_rounds: int
) -> float:
    """Of a draft for one request, as a share of a one-row target step."""
    request = Request("step", (0,), SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0)
    stable.plain.open(request, request.prompt_token_ids)
    lens = itertools.count()

    def step() -> None:
        stable.plain.execute([SpanInput(request.id, next(lens), (0,))])

    timed = _Timed(stable.make(config), step)
    behind = TargetBehind(stable.target) if config.is_companion else None
    rounds = replay(timed, recordings, draft_len, batch=1, behind=behind)
    for _ in itertools.islice(rounds, num_rounds):
        pass
    stable.plain.release(request.id)
    for recording in recordings:  # the last was left half-way
        if behind is not None:
            behind.drop(recording)
    return _typical_s(timed.draft_s) / _typical_s(timed.step_s)


def _typical_s(times_s: Sequence[float]) -> float:
    """The mean without the outer tenths: a cascade's drafts are of two kinds, so a median would show one of them alone."""
    ordered = sorted(times_s)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])


# ---- how fast answers come


def _speedups(
    stable: Stable, configs: Sequence[DrafterConfig], recordings: Sequence[Recording], batch: int, effort: Effort
) -> Mapping[str, float]:
    """Over the plain target: of each drafter the median of several runs, each held against the plain runs before and after
    its turn. Drafters have served other answers before, as any but the first minute of a server's life has seen."""
    long = [r for r in recordings if len(r.output_token_ids) == effort.num_new_tokens] or list(recordings)
    chosen = [*long, *(r for r in recordings if r not in long)][: effort.num_alone if batch == 1 else batch]
    served = [r for r in recordings if r not in chosen][: 4 * effort.num_alone]
    requests = [as_request(recording, order * 1e-6) for order, recording in enumerate(chosen)]
    ratios: dict[str, list[float]] = {config.name: [] for config in configs}
    for _ in range(effort.num_repeats):
        before = tokens_per_s(stable, requests, batch, None)
        paces = {}
        for config in configs:
            drafter = stable.make(config)
            for _ in replay(
                drafter, served, DRAFT_LENS[0], behind=TargetBehind(stable.target) if config.is_companion else None
            ):
                pass
            paces[config.name] = tokens_per_s(stable, requests, batch, drafter)
        after = tokens_per_s(stable, requests, batch, None)
        for name, pace in paces.items():
            ratios[name].append(2 * pace / (before + after))
    return {name: statistics.median(values) for name, values in ratios.items()}


# ---- the report


def result(found: Mapping[str, Findings], num_prompts: int, effort: Effort) -> BenchResult:
    figures: dict[str, float] = {}
    for name, findings in found.items():
        for (temperature, draft_len), rounds in findings.rounds.items():
            if rounds:
                figures[f"accepted_len.{name}.k{draft_len}.{_suffix('mean', temperature)}"] = mean_accepted_len(rounds)
        for draft_len, cost in findings.costs.items():
            figures[f"draft_cost.{name}.k{draft_len}"] = cost
        for (temperature, batch), pace in findings.paces.items():
            figures[f"speedup.{name}.{_suffix(f'batch_{batch}', temperature)}"] = pace
        figures |= {f"{key}.{name}": value for key, value in confidence_figures(findings.rounds[0.0, DRAFT_LENS[0]]).items()}
    for temperature, batch in itertools.product(effort.temperatures, BATCHES):
        best = max(findings.paces[temperature, batch] for findings in found.values())
        figures[f"speedup.best.{_suffix(f'batch_{batch}', temperature)}"] = best
    return BenchResult(
        bench="drafters",
        figures=figures,
        tables=(
            *(_length_table(found, temperature, draft_len) for temperature in TEMPERATURES for draft_len in DRAFT_LENS),
            _position_table(found),
            _cost_table(found, effort),
        ),
        notes=(
            f"{num_prompts} prompts, {effort.num_new_tokens} new tokens; accepted lengths count the bonus token, and are "
            "means over all rounds.",
            "best: the largest of the drafters' medians, so a little lucky. t0.8 in a name: at temperature 0.8.",
            "ece, auroc: of the survival of prefixes at K = 7, temperature 0; ece_online: as the target learns it.",
        ),
    )


def _suffix(name: str, temperature: float) -> str:
    return name if temperature == 0.0 else f"{name}.t{temperature}"


def mean_accepted_len(rounds: Sequence[Round]) -> float:
    return statistics.fmean(r.num_committed for r in rounds)


def conditional_acceptance(rounds: Iterable[Round], num_positions: int) -> list[float | None]:
    """Of each position: how often its token was right, given that it was drafted and those before it were right."""
    tried, right = [0] * num_positions, [0] * num_positions
    for r in rounds:
        for position in range(min(len(r.confidences), r.num_accepted + 1, num_positions)):
            tried[position] += 1
            right[position] += position < r.num_accepted
    return [r / t if t else None for r, t in zip(right, tried, strict=True)]


def confidence_figures(rounds: Sequence[Round]) -> dict[str, float]:
    """``ece``: mean over the positions of the calibration error of survival, as the drafter tells it; ``ece_online``: as
    verification corrects it, each draft judged before it was learned from; ``auroc``: over all prefixes."""
    drafted = [r for r in rounds if r.confidences]
    if not drafted:
        return {}
    online = OnlineSurvival()
    foreseen = []
    for r in drafted:
        foreseen.append((online.survival([r.confidences])[0], r.num_accepted))
        online.record(r.confidences, r.num_accepted)
    records = Records.of([(r.confidences, r.num_accepted) for r in drafted])
    told = records.confidences.cumprod(axis=1)
    corrected = Records.of(foreseen).confidences
    cases = [k for k in range(records.max_len) if records.reaching(k).sum() >= MIN_CASES]
    figures = {}
    for key, survival in (("ece", told), ("ece_online", corrected)):
        errors = [
            expected_calibration_error(survival[records.reaching(k), k], records.survived(k)[records.reaching(k)])
            for k in cases
        ]
        if errors:
            figures[key] = statistics.fmean(errors)
    pairs = [(told[records.reaching(k), k], records.survived(k)[records.reaching(k)]) for k in cases]
    ranking = auroc([p for ps, _ in pairs for p in ps], [y for _, ys in pairs for y in ys])
    return figures if ranking is None else figures | {"auroc": ranking}


def _length_table(found: Mapping[str, Findings], temperature: float, draft_len: int) -> Table:
    domains = sorted({r.domain for findings in found.values() for r in findings.rounds[temperature, draft_len]})
    rows: list[tuple[Cell, ...]] = []
    for domain in (*domains, None):
        row: list[Cell] = [domain or "all"]
        for findings in found.values():
            rounds = [r for r in findings.rounds[temperature, draft_len] if domain in (None, r.domain)]
            row.append(mean_accepted_len(rounds) if rounds else "-")
        rows.append(tuple(row))
    return Table(f"mean accepted length, K = {draft_len}, temperature {temperature}", ("domain", *found), tuple(rows))


def _position_table(found: Mapping[str, Findings]) -> Table:
    longest = DRAFT_LENS[0]
    rows: list[tuple[Cell, ...]] = []
    for name, findings in found.items():
        rounds = findings.rounds[0.0, longest]
        shares = conditional_acceptance(rounds, longest)
        num_drafted = sum(len(r.confidences) for r in rounds) / max(1, len(rounds))
        rows.append((name, num_drafted, *("-" if share is None else share for share in shares)))
    positions = (str(position + 1) for position in range(longest))
    return Table(
        f"conditional acceptance by position, K = {longest}, temperature 0",
        ("drafter", "drafted a round", *positions),
        tuple(rows),
    )


def _cost_table(found: Mapping[str, Findings], effort: Effort) -> Table:
    keys = list(itertools.product(effort.temperatures, BATCHES))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(f.costs[draft_len] for draft_len in DRAFT_LENS), *(f.paces[key] for key in keys))
        for name, f in found.items()
    )
    return Table(
        "cost of a draft over a one-row target step, and speed-up over plain decoding",
        ("drafter", *(f"cost K={k}" for k in DRAFT_LENS), *(f"T={t:g}, batch {b}" for t, b in keys)),
        rows,
    )
