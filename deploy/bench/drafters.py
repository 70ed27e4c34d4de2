"""``outrider bench drafters``: what each drafter of the pool brings and costs, and how fast answers come with it.

Accepted lengths are held against recorded answers of the target, which is exact (``drafters.replay``), and always count the
bonus token. Draft costs and speed-ups are measured in this process, in turn with the plain target. Every measurement gets a
new drafter, for most learn while they serve.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from cluster.config import DrafterConfig
from cluster.types import Request, SamplingParams
from deploy.bench.accepted import accepted
from deploy.bench.pace import Speedup, sample, speedups
from deploy.bench.pool import pool
from deploy.bench.report import BenchOptions, BenchResult, Cell, Table
from deploy.bench.stable import Stable
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
NUM_COST_ANSWERS = 12  # of which drafts are timed
MIN_CASES = 30  # of a position before its calibration error means anything


@dataclass(frozen=True, slots=True)
class Effort:
    num_synthetic: int
    max_per_domain: int
    num_prompts: int | None  # in all; None: no bound
    num_new_tokens: int
    num_cost_rounds: int
    num_groups: Mapping[int, int]  # of requests whose speed is measured, by how many run at once
    temperatures: tuple[float, ...]  # of the speed-ups


QUICK = Effort(18, 2, 24, 32, 24, {1: 3, 4: 1, 8: 1, 16: 1}, (0.0,))
# At batch 1 twice as many requests as the prompts of Spec-Bench and the like have domains: they differ most.
FULL = Effort(120, MAX_PER_DOMAIN, None, 128, 120, {1: 26, 4: 4, 8: 2, 16: 2}, TEMPERATURES)


@dataclass(slots=True)
class Findings:
    """Of one drafter."""

    rounds: dict[tuple[float, int], list[Round]] = field(default_factory=dict)  # by temperature and draft length
    costs: dict[int, float] = field(default_factory=dict)  # by draft length
    paces: dict[tuple[float, int], Speedup] = field(default_factory=dict)  # by temperature and batch


def run(options: BenchOptions) -> BenchResult:
    effort = QUICK if options.quick else FULL
    console = Console(stderr=True)
    configs = pool(options.model)
    stable = Stable(options.model, configs, effort.num_new_tokens)
    prompts = _prompts(options, effort)
    rounds, recordings = accepted(
        stable, configs, prompts, DRAFT_LENS, TEMPERATURES, lambda what: console.print(f"drafters: {what}", highlight=False)
    )
    found = {config.name: Findings() for config in configs}
    for (name, temperature, draft_len), of_drafter in rounds.items():
        found[name].rounds[temperature, draft_len] = of_drafter
    for config, draft_len in itertools.product(configs, DRAFT_LENS):
        console.print(f"drafters: cost of {config.name}, K = {draft_len}", highlight=False)
        cost = _draft_cost(stable, config, recordings[0.0], draft_len, effort.num_cost_rounds)
        found[config.name].costs[draft_len] = cost
    for temperature, batch in itertools.product(effort.temperatures, BATCHES):
        console.print(f"drafters: speed at batch {batch}, temperature {temperature}", highlight=False)
        paces = speedups(stable, configs, recordings[temperature], batch, effort.num_groups[batch])
        for name, pace in paces.items():
            found[name].paces[temperature, batch] = pace
    return result(found, len(prompts), effort)


def _prompts(options: BenchOptions, effort: Effort) -> list[Prompt]:
    if not options.prompts:
        return choose_prompts((), effort.num_synthetic)
    if effort.num_prompts is not None:
        return choose_prompts(options.prompts, effort.num_prompts)
    return load_prompts(options.prompts, effort.max_per_domain)


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
    chosen, _ = sample(recordings, NUM_COST_ANSWERS)
    with stable.holding(chosen):
        for recording in chosen:
            for _ in itertools.islice(replay(timed, [recording], draft_len), -(-num_rounds // len(chosen))):
                pass
            timed.release(recording.name)  # which was left half-way
    stable.plain.release(request.id)
    return _typical_s(timed.draft_s) / _typical_s(timed.step_s)


def _typical_s(times_s: Sequence[float]) -> float:
    """The mean without the outer tenths: a cascade's drafts are of two kinds, so a median would show one of them alone."""
    ordered = sorted(times_s)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])


# ---- the report


def result(found: Mapping[str, Findings], num_prompts: int, effort: Effort) -> BenchResult:
    figures: dict[str, float] = {}
    for name, findings in found.items():
        for (temperature, draft_len), rounds in findings.rounds.items():
            if rounds:
                figures[f"accepted_len.{name}.k{draft_len}.{_suffix('mean', temperature)}"] = mean_accepted_len(rounds)
        longest = findings.rounds[0.0, DRAFT_LENS[0]]
        for domain in sorted({r.domain for r in longest}):
            of_domain = [r for r in longest if r.domain == domain]
            figures[f"accepted_len.{name}.k{DRAFT_LENS[0]}.{domain}"] = mean_accepted_len(of_domain)
        for draft_len, cost in findings.costs.items():
            figures[f"draft_cost.{name}.k{draft_len}"] = cost
        for (temperature, batch), pace in findings.paces.items():
            figures[f"speedup.{name}.{_suffix(f'batch_{batch}', temperature)}"] = pace.value
            if batch == 1 and pace.error is not None:
                figures[f"speedup_error.{name}.{_suffix(f'batch_{batch}', temperature)}"] = pace.error
        figures |= {f"{key}.{name}": value for key, value in confidence_figures(findings.rounds[0.0, DRAFT_LENS[0]]).items()}
    for temperature, batch in itertools.product(effort.temperatures, BATCHES):
        best = max(findings.paces[temperature, batch].value for findings in found.values())
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
            "speed-ups: seconds of the same answers plainly over those with the drafter, prefill left out; at batch "
            + ", ".join(f"{batch} of {batch * num}" for batch, num in effort.num_groups.items())
            + " answers, drawn at random from all domains alike, whatever their length.",
            "speedup_error: the standard error that the choice of answers and the machine leave.",
            "best: the largest of the drafters', so a little lucky. t0.8 in a name: at temperature 0.8.",
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
        (name, *(f.costs[draft_len] for draft_len in DRAFT_LENS), *(f.paces[key].value for key in keys))
        for name, f in found.items()
    )
    return Table(
        "cost of a draft over a one-row target step, and speed-up over plain decoding",
        ("drafter", *(f"cost K={k}" for k in DRAFT_LENS), *(f"T={t:g}, batch {b}" for t, b in keys)),
        rows,
    )
