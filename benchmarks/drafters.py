"""``outrider bench drafters``: acceptance and cost of each drafter of the pool. Speeds are those of ``outrider bench arms``.

Accepted lengths come from replaying recorded answers of the target, which is exact (``drafters.replay``), and include
the bonus token. Draft costs are measured in this process, in turn with steps of the plain target. Each measurement uses a
new drafter, because most learn while they serve.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rich.console import Console

from benchmarks import equal_drafters
from benchmarks.fixtures import MAX_BATCH, Fixtures
from benchmarks.harness import Harness, RunConditions
from benchmarks.pool import pool
from benchmarks.prompts import BenchPrompt, choose_prompts, load_prompts, spread
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.rounds import conditional_acceptance, confidence_figures, mean_accepted_len
from cluster.config import DrafterConfig, HiddenStateOptions
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.replay import Recording, Round, replay
from engine.cpu_setup import in_own_thread
from router.plan import Span

DRAFT_LENS = (7, 4)
TEMPERATURES = (0.0, 0.8)
MAX_PER_DOMAIN = 40

NUM_REMOTE_PROMPTS, NUM_REMOTE_TOKENS = 4, 24
NUM_COST_ANSWERS = 12  # answers whose drafts are timed

Key = tuple[str, float, int]  # drafter, temperature, draft length


@dataclass(frozen=True, slots=True)
class Effort:
    num_synthetic: int
    num_prompts: int | None  # in all; None: MAX_PER_DOMAIN of each domain
    num_new_tokens: int
    num_cost_rounds: int


QUICK, FULL = Effort(18, 24, 32, 24), Effort(380, None, 128, 120)


@dataclass(slots=True)
class Findings:
    """Results of one drafter."""

    rounds: dict[tuple[float, int], list[Round]] = field(default_factory=dict)  # by temperature and draft length
    costs: dict[int, float] = field(default_factory=dict)  # by draft length


class _Timed:
    """A drafter whose drafts are timed, each beside a one-row step of the target."""

    capabilities = Capabilities()

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


def draft_cost(
    fixtures: Fixtures, config: DrafterConfig, recordings: Sequence[Recording], draft_len: int, num_rounds: int
) -> float:
    """Time of a draft for one request over the time of a one-row target step."""
    request = Request("step", (0,), SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0)
    fixtures.plain.open(request, request.prompt_token_ids)
    lens = itertools.count()

    def step() -> None:
        fixtures.plain.execute([Span.bound(request.id, next(lens), (0,))])

    timed = _Timed(fixtures.make(config), step)
    chosen = sample(recordings, NUM_COST_ANSWERS)
    with fixtures.holding(chosen):
        for recording in chosen:
            for _ in itertools.islice(replay(timed, [recording], draft_len), -(-num_rounds // len(chosen))):
                pass
            timed.release(recording.name)  # not finished
    fixtures.plain.release(request.id)
    return _typical_s(timed.draft_s) / _typical_s(timed.step_s)


def sample(recordings: Sequence[Recording], num: int) -> list[Recording]:
    """At most ``num`` answers, drawn equally from all domains."""
    usable = [recording for recording in recordings if len(recording.output_token_ids) > 2] or list(recordings)
    return spread(random.Random(0).sample(usable, len(usable)), num)


def _typical_s(times_s: Sequence[float]) -> float:
    """Trimmed mean without the outer tenths. A cascade's drafts have two modes, of which a median would show one."""
    ordered = sorted(times_s)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def run(options: BenchOptions) -> BenchResult:
    effort = QUICK if options.quick else FULL
    elapsed_s = _stopwatch()
    console = Console(stderr=True)

    def tell(what: str) -> None:
        minutes, seconds = divmod(int(elapsed_s()), 60)
        console.print(f"drafters: {minutes}:{seconds:02} {what}", highlight=False, soft_wrap=True)

    alike = equal_drafters.trained(equal_drafters.recipe(options.model, quick=options.quick), tell)
    configs = (*pool(options.model), *alike)
    fixtures = in_own_thread(lambda: Fixtures(options.model, configs, effort.num_new_tokens))
    prompts = _prompts(options, effort)
    rounds, recordings = in_own_thread(lambda: _accepted(fixtures, configs, prompts, tell))
    found = {config.name: Findings() for config in configs}
    for (name, temperature, draft_len), of_drafter in rounds.items():
        found[name].rounds[temperature, draft_len] = of_drafter
    for config, draft_len in itertools.product(configs, DRAFT_LENS):
        tell(f"cost of {config.name}, K = {draft_len}")
        measure = partial(draft_cost, fixtures, config, recordings[0.0], draft_len, effort.num_cost_rounds)
        found[config.name].costs[draft_len] = in_own_thread(measure)
    tell("remote drafters")
    remote = remote_over_colocated(options.model, configs, prompts)
    tell("done")
    one = result(found, len(prompts), effort.num_new_tokens)
    return replace(one, figures={**one.figures, **remote})


def _accepted(
    fixtures: Fixtures,
    configs: Sequence[DrafterConfig],
    prompts: Sequence[BenchPrompt],
    tell: Callable[[str], None],
) -> tuple[Mapping[Key, list[Round]], Mapping[float, list[Recording]]]:
    """The rounds of all drafters, and the answers that they were replayed on.

    Answers are recorded in parts, and every drafter is replayed on a part while the target's cache still holds it. A drafter
    has one instance per temperature and draft length, which sees all parts: most learn.
    """
    drafters = {(config.name, t, n): fixtures.make(config) for config in configs for t in TEMPERATURES for n in DRAFT_LENS}
    rounds: dict[Key, list[Round]] = {key: [] for key in drafters}
    recordings: dict[float, list[Recording]] = {t: [] for t in TEMPERATURES}
    for number, part in enumerate(fixtures.record(prompts, TEMPERATURES)):
        tell(f"answers {number * MAX_BATCH + 1} to {min(len(prompts), (number + 1) * MAX_BATCH)} of {len(prompts)}")
        for temperature, answers in part.items():
            recordings[temperature].extend(answers)
            with fixtures.holding(answers):
                for key, drafter in drafters.items():
                    if key[1] == temperature:
                        rounds[key] += replay(drafter, answers, key[2], batch=MAX_BATCH)
    return rounds, recordings


def remote_over_colocated(model: str, configs: Sequence[DrafterConfig], prompts: Sequence[BenchPrompt]) -> dict[str, float]:
    """Accepted length of the first drafter on hidden states behind a tensor link, over that in the target's process."""
    readers = [config for config in configs if isinstance(config.options, HiddenStateOptions)]
    if not readers:
        return {}
    rig = Harness(model, [prompt.text for prompt in prompts[:NUM_REMOTE_PROMPTS]], NUM_REMOTE_TOKENS)
    lens = []
    for is_remote in (True, False):
        own = readers[0].model_copy(update={"remote": is_remote})
        rounds = [
            c for one in rig.run(RunConditions(companions=(own,))).completions for c in one.commits if c.finish is None
        ]
        lens.append(sum(len(c.token_ids) for c in rounds) / len(rounds))
    return {"remote_over_colocated.accepted_len": lens[0] / lens[1]}


def _stopwatch() -> Callable[[], float]:
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s


def _prompts(options: BenchOptions, effort: Effort) -> list[BenchPrompt]:
    if not options.prompts:
        return choose_prompts((), effort.num_synthetic)
    if effort.num_prompts is not None:
        return choose_prompts(options.prompts, effort.num_prompts)
    return load_prompts(options.prompts, MAX_PER_DOMAIN)


# ---- the report


def result(found: Mapping[str, Findings], num_prompts: int, num_new_tokens: int) -> BenchResult:
    figures: dict[str, float] = {}
    for name, findings in found.items():
        for (temperature, draft_len), rounds in findings.rounds.items():
            if rounds:
                figures[f"accepted_len.{name}.k{draft_len}.{_suffix('mean', temperature)}"] = mean_accepted_len(rounds)
        for temperature in TEMPERATURES:
            shares = conditional_acceptance(findings.rounds[temperature, DRAFT_LENS[0]], DRAFT_LENS[0])
            for position, share in enumerate(shares, start=1):
                if share is not None:
                    figures[f"acceptance.{name}.{_suffix(f'position_{position}', temperature)}"] = share
        longest = findings.rounds[0.0, DRAFT_LENS[0]]
        for domain in sorted({r.domain for r in longest}):
            of_domain = [r for r in longest if r.domain == domain]
            figures[f"accepted_len.{name}.k{DRAFT_LENS[0]}.{domain}"] = mean_accepted_len(of_domain)
        for draft_len, cost in findings.costs.items():
            figures[f"draft_cost.{name}.k{draft_len}"] = cost
        for temperature in TEMPERATURES:
            found_there = confidence_figures(findings.rounds[temperature, DRAFT_LENS[0]])
            figures |= {_suffix(f"{key}.{name}", temperature): value for key, value in found_there.items()}
    return BenchResult(
        bench="drafters",
        figures=figures,
        tables=(
            *(_length_table(found, temperature, draft_len) for temperature in TEMPERATURES for draft_len in DRAFT_LENS),
            *(_position_table(found, temperature) for temperature in TEMPERATURES),
            *(_domain_table(found, temperature) for temperature in TEMPERATURES),
            _cost_table(found),
            *([equal_drafters.paper_table()] if found.keys() & set(equal_drafters.NAMES) else ()),
        ),
        notes=(
            f"{num_prompts} prompts, {num_new_tokens} new tokens; accepted lengths count the bonus token, and are "
            "means over all rounds.",
            "t0.8 in a name: at temperature 0.8.",
            "ece, auroc, brier: of the survival of prefixes at K = 7; ece is a mean over the positions, ece_online "
            "as the target learns it, ece_floor what so few drafts would show if confidences were right; auroc_by_position "
            "ranks prefixes of the same length only.",
            "acceptance.position_n: how often the nth token of a draft was right, K = 7, given that it was drafted and all "
            "before it were right.",
        ),
    )


def _suffix(name: str, temperature: float) -> str:
    return name if temperature == 0.0 else f"{name}.t{temperature}"


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


def _position_table(found: Mapping[str, Findings], temperature: float) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, findings in found.items():
        rounds = findings.rounds[temperature, DRAFT_LENS[0]]
        num_drafted = sum(len(r.confidences) for r in rounds) / max(1, len(rounds))
        rows.append((name, num_drafted, *_shares(rounds)))
    return Table(
        f"conditional acceptance by position, K = {DRAFT_LENS[0]}, temperature {temperature:g}",
        ("drafter", "drafted a round", *_positions()),
        tuple(rows),
    )


def _domain_table(found: Mapping[str, Findings], temperature: float) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, findings in found.items():
        rounds = findings.rounds[temperature, DRAFT_LENS[0]]
        for domain in sorted({r.domain for r in rounds}):
            rows.append((name, domain, *_shares([r for r in rounds if r.domain == domain])))
    return Table(
        f"the same by domain, K = {DRAFT_LENS[0]}, temperature {temperature:g}",
        ("drafter", "domain", *_positions()),
        tuple(rows),
    )


def _positions() -> tuple[str, ...]:
    return tuple(str(position + 1) for position in range(DRAFT_LENS[0]))


def _shares(rounds: Sequence[Round]) -> tuple[Cell, ...]:
    return tuple("-" if share is None else share for share in conditional_acceptance(rounds, DRAFT_LENS[0]))


def _cost_table(found: Mapping[str, Findings]) -> Table:
    return Table(
        "cost of a draft over a one-row target step",
        ("drafter", *(f"K={draft_len}" for draft_len in DRAFT_LENS)),
        tuple((name, *(findings.costs[draft_len] for draft_len in DRAFT_LENS)) for name, findings in found.items()),
    )
