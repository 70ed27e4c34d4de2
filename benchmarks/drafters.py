"""``outrider bench drafters``: acceptance and cost of each drafter of the pool, and the speed-up with it.

Accepted lengths come from replaying recorded answers of the target, which is exact (``drafters.replay``), and include
the bonus token. Draft costs and speed-ups are measured in this process, alternating with the plain target. Each such
measurement uses a new drafter, because most learn while they serve.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console

from benchmarks.accepted_length import accepted
from benchmarks.draft_cost import draft_cost
from benchmarks.fixtures import Fixtures
from benchmarks.pool import pool
from benchmarks.prompts import BenchPrompt, choose_prompts, load_prompts
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.rounds import conditional_acceptance, confidence_figures, mean_accepted_len
from benchmarks.throughput import NEAR, NumLaps, PairedRuns, Speedup
from cluster.config import DrafterConfig
from drafters.replay import Recording, Round
from engine.threads import in_own_thread

DRAFT_LENS = (7, 4)
TEMPERATURES = (0.0, 0.8)
MAX_PER_DOMAIN = 40


@dataclass(frozen=True, slots=True)
class Effort:
    """``max_s``: time after which only the drafters near the best are measured further."""

    num_synthetic: int
    max_per_domain: int
    num_prompts: int | None  # in all; None: no limit
    num_new_tokens: int
    num_cost_rounds: int
    turns: Mapping[float, Mapping[int, NumLaps]]  # of the speed-ups, by temperature and batch; in this order
    max_s: float

    @property
    def races(self) -> list[tuple[float, int]]:
        """Temperature and batch of each measurement."""
        return [(temperature, batch) for temperature, turns in self.turns.items() for batch in turns]


# So few answers could not fill a large batch.
QUICK = Effort(18, 2, 24, 32, 24, {0.0: {1: NumLaps(1, 1), 4: NumLaps(1, 1)}}, 240.0)
# A lap of a small batch has few answers, so there are more laps.
FULL = Effort(
    380,
    MAX_PER_DOMAIN,
    None,
    128,
    120,
    {
        0.0: {1: NumLaps(2, 9), 4: NumLaps(1, 4), 8: NumLaps(1, 3), 16: NumLaps(1, 4)},
        0.8: {1: NumLaps(2, 4), 8: NumLaps(1, 2)},
    },
    40 * 60.0,
)


@dataclass(slots=True)
class Findings:
    """Results of one drafter."""

    rounds: dict[tuple[float, int], list[Round]] = field(default_factory=dict)  # by temperature and draft length
    costs: dict[int, float] = field(default_factory=dict)  # by draft length
    speedups: dict[tuple[float, int], Speedup] = field(default_factory=dict)  # by temperature and batch


def run(options: BenchOptions) -> BenchResult:
    effort = QUICK if options.quick else FULL
    elapsed_s = _stopwatch()
    console = Console(stderr=True)

    def tell(what: str) -> None:
        minutes, seconds = divmod(int(elapsed_s()), 60)
        console.print(f"drafters: {minutes}:{seconds:02} {what}", highlight=False, soft_wrap=True)

    configs = pool(options.model)
    fixtures = in_own_thread(lambda: Fixtures(options.model, configs, effort.num_new_tokens))
    prompts = _prompts(options, effort)
    rounds, recordings = in_own_thread(lambda: accepted(fixtures, configs, prompts, DRAFT_LENS, TEMPERATURES, tell))
    found = {config.name: Findings() for config in configs}
    for (name, temperature, draft_len), of_drafter in rounds.items():
        found[name].rounds[temperature, draft_len] = of_drafter
    for config, draft_len in itertools.product(configs, DRAFT_LENS):
        tell(f"cost of {config.name}, K = {draft_len}")
        measure = partial(draft_cost, fixtures, config, recordings[0.0], draft_len, effort.num_cost_rounds)
        found[config.name].costs[draft_len] = in_own_thread(measure)

    def has_time() -> bool:
        return elapsed_s() < effort.max_s

    for temperature, turns in effort.turns.items():
        tell(f"speed at temperature {temperature}")
        for batch, by_name in _speedups(fixtures, configs, recordings[temperature], turns, has_time, tell).items():
            for name, speedup in by_name.items():
                found[name].speedups[temperature, batch] = speedup
    tell("done")
    return result(found, len(prompts), effort)


def _stopwatch() -> Callable[[], float]:
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s


def _speedups(
    fixtures: Fixtures,
    configs: Sequence[DrafterConfig],
    recordings: Sequence[Recording],
    turns: Mapping[int, NumLaps],
    has_time: Callable[[], bool],
    tell: Callable[[str], None],
) -> dict[int, dict[str, Speedup]]:
    """Speed-ups by batch: all drafters first, then those near the best while time is left."""
    races: dict[int, PairedRuns] = {}

    def step(batch: int, who: str) -> None:
        tell(f"speed of {who} at batch {batch}")
        pairs = races[batch].step()
        rates = (f"{name} {pair.drafted.tokens_per_s:.0f} and {pair.plain.tokens_per_s:.0f}" for name, pair in pairs.items())
        tell(f"tokens a second with and without: {', '.join(rates)}")

    with ExitStack() as opened:
        for batch, turns_of_batch in turns.items():
            tell(f"warming up for batch {batch}")
            race = races[batch] = PairedRuns(fixtures, configs, recordings, batch, turns_of_batch)
            opened.callback(race.close)
            while not race.all_had_turns:
                step(batch, "all")
        while under_way := [batch for batch, race in races.items() if not race.is_over]:
            for batch in under_way:
                if not has_time():
                    tell("speed of the best: no time is left for more")
                    return {batch: race.speedups() for batch, race in races.items()}
                step(batch, "the best")
    return {batch: race.speedups() for batch, race in races.items()}


def _prompts(options: BenchOptions, effort: Effort) -> list[BenchPrompt]:
    if not options.prompts:
        return choose_prompts((), effort.num_synthetic)
    if effort.num_prompts is not None:
        return choose_prompts(options.prompts, effort.num_prompts)
    return load_prompts(options.prompts, effort.max_per_domain)


# ---- the report


def result(found: Mapping[str, Findings], num_prompts: int, effort: Effort) -> BenchResult:
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
        for (temperature, batch), speedup in findings.speedups.items():
            figures[f"speedup.{name}.{_suffix(f'batch_{batch}', temperature)}"] = speedup.value
            if speedup.error is not None:
                figures[f"speedup_error.{name}.{_suffix(f'batch_{batch}', temperature)}"] = speedup.error
        for temperature in TEMPERATURES:
            found_there = confidence_figures(findings.rounds[temperature, DRAFT_LENS[0]])
            figures |= {_suffix(f"{key}.{name}", temperature): value for key, value in found_there.items()}
    for key in effort.races:
        speedups = [findings.speedups[key].value for findings in found.values() if key in findings.speedups]
        if speedups:
            figures[f"speedup.best.{_suffix(f'batch_{key[1]}', key[0])}"] = max(speedups)
    return BenchResult(
        bench="drafters",
        figures=figures,
        tables=(
            *(_length_table(found, temperature, draft_len) for temperature in TEMPERATURES for draft_len in DRAFT_LENS),
            *(_position_table(found, temperature) for temperature in TEMPERATURES),
            *(_domain_table(found, temperature) for temperature in TEMPERATURES),
            _cost_table(found),
            _speed_table(found, effort),
        ),
        notes=(
            f"{num_prompts} prompts, {effort.num_new_tokens} new tokens; accepted lengths count the bonus token, and are "
            "means over all rounds.",
            "speed-ups: seconds for a token plainly over those with the drafter, always so many requests under way, prompts "
            "cached before; answers drawn at random from all domains alike, whatever their length. First all drafters, then "
            f"those within {NEAR:.0%} of the best on more answers as long as there is time, at the lower temperature first.",
            "the plain target serves the same answers beside each drafter, in turns of a round, each to whoever has "
            "told fewer tokens: so both meet what else the machine does.",
            "speedup_error: the standard error that the choice of answers and the machine leave; none of a single lap.",
            "best: the largest of the drafters', so a little lucky. t0.8 in a name: at temperature 0.8.",
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


def _speed_table(found: Mapping[str, Findings], effort: Effort) -> Table:
    """One row per temperature and batch."""
    rows: list[tuple[Cell, ...]] = []
    for temperature, batch in effort.races:
        cells = [_speed_cell(findings.speedups.get((temperature, batch))) for findings in found.values()]
        rows.append((f"T={temperature:g}, batch {batch}", *cells))
    title = "speed-up over plain decoding, its standard error, and on how many answers"
    return Table(title, ("", *found), tuple(rows))


def _speed_cell(speedup: Speedup | None) -> str:
    if speedup is None:
        return "-"
    error = "" if speedup.error is None else f" ±{speedup.error:.2f}"
    return f"{speedup.value:.2f}{error} ({speedup.num_answers})"
