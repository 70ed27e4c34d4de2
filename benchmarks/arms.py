"""Drafting as routed, beside no drafting and each drafter by name, on one server of the default pool.

Arms take turns of seconds, every other round of turns backwards. In a round all arms answer the same prompts, each under a
cache salt of its own, so that none finds the prefix or the text of another. So each round gives one ratio for each pair of
arms, and noise that lasts longer than a turn cancels. Rounds go on until the standard error is small enough.
"""

import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.load import HttpTarget, LoadRequest, checked, run_streams, sum_tokens
from benchmarks.prompts import choose_prompts
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.serve import local_config, tokenize, with_state
from benchmarks.server import ServerProcess
from cluster.config import Config, TargetConfig
from engine.models.prepare import ensure_model

STREAMS = (1, 4, 8, 16, 32)
OFF, AUTO = "off", "auto"
MAX_TOKENS = 48
MIN_TURN_ANSWERS = 2  # at one stream; at more, one a stream
NUM_PROMPTS = 520
MAX_ERROR = 0.02  # standard error of the log of a ratio
MIN_ROUNDS = 4
LEAST_ROUNDS = 2  # past any limit of time: one round has no error
LIMIT_S, LIMIT_QUICK_S = 900.0, 25.0  # for each number of streams
FIRST_MINUTE_S = 60.0
WARM_ROUNDS = 1  # whose ratios do not count, after the first minute is over
FIRST_STREAMS, FIRST_STREAMS_QUICK = STREAMS, (8,)  # of fresh servers


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds a token, by wall time and by processor time of the target's process."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of the speeds of two arms: geometric mean over the rounds, and its relative standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, logs: Sequence[float]) -> "Ratio":
        """``logs``: of the ratio in each round."""
        return cls(math.exp(statistics.fmean(logs)), statistics.stdev(logs) / math.sqrt(len(logs)))


@dataclass(slots=True)
class Rounds:
    """The turns of all arms, by arm; turn i of each is of round i."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def ratio(self, arm: str, other: str, by: str = "wall_s") -> Ratio:
        """Speed of ``arm`` over that of ``other``."""
        pairs = zip(self.turns[arm], self.turns[other], strict=True)
        return Ratio.of([math.log(getattr(theirs, by) / getattr(ours, by)) for ours, theirs in pairs])

    def best(self) -> str:
        """The fastest arm by name, in hindsight."""
        named = [arm for arm in self.turns if arm not in (OFF, AUTO)]
        return max(named, key=lambda arm: self.ratio(arm, OFF).value)

    @property
    def num(self) -> int:
        return min(map(len, self.turns.values()), default=0)

    def is_settled(self) -> bool:
        if self.num < MIN_ROUNDS:
            return False
        return max(self.ratio(AUTO, OFF).error, self.ratio(AUTO, self.best()).error) <= MAX_ERROR


class Server:
    """A fresh server, with a state folder of its own."""

    def __init__(self, config: Config, prompts: Sequence[tuple[int, ...]]) -> None:
        self.arms = (OFF, AUTO, *(drafter.name for drafter in config.drafters))
        self._config = config
        self._prompts = itertools.cycle(prompts)
        self._number = itertools.count()

    @contextmanager
    def running(self) -> Iterator["Server"]:
        with (
            tempfile.TemporaryDirectory(prefix="outrider-arms-") as folder,
            ServerProcess(with_state(self._config, Path(folder))) as process,
        ):
            process.wait_ready()
            self._targets = process.workers("TargetActor")
            self._http = HttpTarget(self._config.api.host, self._config.api.port, self._config.model.public_names[0])
            yield self

    def round(self, arms: Sequence[str], num_streams: int, rounds: Rounds) -> None:
        """One turn of each arm, in the order given, with the same prompts."""
        prompts = [next(self._prompts) for _ in range(max(num_streams, MIN_TURN_ANSWERS))]
        for arm in arms:
            rounds.turns.setdefault(arm, []).append(self._turn(arm, prompts, num_streams))

    def _turn(self, arm: str, prompts: Sequence[tuple[int, ...]], num_streams: int) -> Turn:
        salt = f"arms-{next(self._number)}"
        asks = [
            LoadRequest(f"{salt}-{i}", prompt, MAX_TOKENS, drafting=arm, cache_salt=salt) for i, prompt in enumerate(prompts)
        ]
        began_s, began_cpu_s = time.monotonic(), self._cpu_s()
        answers = asyncio.run(run_streams(self._http.ask, asks, num_streams))
        num_tokens = sum_tokens(checked(answers, f"a request of {arm}"))
        return Turn((time.monotonic() - began_s) / num_tokens, (self._cpu_s() - began_cpu_s) / num_tokens)

    def _cpu_s(self) -> float:
        times = [target.cpu_times() for target in self._targets]
        return sum([each.user + each.system for each in times])


def run(options: BenchOptions) -> BenchResult:
    """Figures, for N streams: ``auto_over_off.N``, ``auto_over_best.N`` (the best arm by name, in hindsight) and
    ``first_minute.auto_over_off.N`` (of a fresh server), by wall time; with ``.se``, the relative standard error; and with
    ``.cpu`` the same by processor time of the target's process."""
    prompts = _prompts(options)
    console = Console(stderr=True)
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    fresh = FIRST_STREAMS_QUICK if options.quick else FIRST_STREAMS
    for num_streams in fresh:
        with Server(_config(options), prompts).running() as server:
            first = _play(server, (OFF, AUTO), num_streams, FIRST_MINUTE_S, to_settle=False)
            _add(figures, "first_minute.auto_over_off", num_streams, first, OFF)
            console.print(f"arms: first minute at {num_streams} streams, {first.num} rounds", highlight=False)
            if num_streams == fresh[-1]:
                rows = _all_arms(server, LIMIT_QUICK_S if options.quick else LIMIT_S, figures, console)
    columns = ("streams", "arm", "over off", "standard error", "by processor time", "standard error", "rounds")
    return BenchResult("arms", figures, (Table("Speed of each arm over no drafting", columns, tuple(rows)),))


def _all_arms(server: Server, limit_s: float, figures: dict[str, float], console: Console) -> list[tuple[Cell, ...]]:
    """At each number of streams, on a server whose first minute is over."""
    rows: list[tuple[Cell, ...]] = []
    for num_streams in STREAMS:
        for _ in range(WARM_ROUNDS):
            server.round(server.arms, num_streams, Rounds())
        rounds = _play(server, server.arms, num_streams, limit_s)
        best = rounds.best()
        _add(figures, "auto_over_off", num_streams, rounds, OFF)
        _add(figures, "auto_over_best", num_streams, rounds, best)
        rows += _rows(rounds, num_streams)
        settled = "" if rounds.is_settled() else f", standard error still above {MAX_ERROR:g}"
        console.print(f"arms: {num_streams} streams, {rounds.num} rounds, best {best}{settled}", highlight=False)
    return rows


def _prompts(options: BenchOptions) -> list[tuple[int, ...]]:
    files = options.prompts or options.data_prompts
    num = len(choose_prompts(files, NUM_PROMPTS))
    return tokenize(Path(ensure_model(options.model)), files, num)


def _config(options: BenchOptions) -> Config:
    return local_config(options.model, TargetConfig.model_validate({"engine": options.engine}))


def _play(server: Server, arms: Sequence[str], num_streams: int, limit_s: float, to_settle: bool = True) -> Rounds:
    """Rounds of turns, every other one backwards, for as long as ``limit_s`` allows, or until the error is small enough."""
    rounds, end_s = Rounds(), time.monotonic() + limit_s
    for number in itertools.count():
        server.round(arms if number % 2 == 0 else arms[::-1], num_streams, rounds)
        if (time.monotonic() >= end_s and rounds.num >= LEAST_ROUNDS) or (to_settle and rounds.is_settled()):
            return rounds
    raise AssertionError("unreachable")


def _add(figures: dict[str, float], name: str, num_streams: int, rounds: Rounds, other: str) -> None:
    for suffix, by in (("", "wall_s"), (".cpu", "cpu_s")):
        ratio = rounds.ratio(AUTO, other, by)
        figures[f"{name}.{num_streams}{suffix}"] = ratio.value
        figures[f"{name}.{num_streams}{suffix}.se"] = ratio.error


def _rows(rounds: Rounds, num_streams: int) -> list[tuple[Cell, ...]]:
    found: list[tuple[Cell, ...]] = []
    for arm in rounds.turns:
        wall, cpu = rounds.ratio(arm, OFF), rounds.ratio(arm, OFF, "cpu_s")
        found.append((num_streams, arm, wall.value, wall.error, cpu.value, cpu.error, rounds.num))
    return found
