"""Throughput with and without drafters: the whole engine and round, with a constant number of running requests."""

import gc
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.fixtures import Fixtures, as_request
from benchmarks.interleaved import Served, Throughput, run_interleaved
from benchmarks.prompts import spread
from cluster.config import DrafterConfig
from cluster.types import Request
from drafters.replay import Recording
from engine.threads import in_own_thread

NUM_SERVED_BEFORE = 4  # warm-up answers of a cluster, or two per place
NUM_PER_PLACE = 3  # so that answers begin and end at different times
NUM_OTHERS_PER_PLACE = 2.5  # some places take two or three until the slowest answer ends
NEAR = 0.15  # below the best: about the error from the choice of a few answers


@dataclass(frozen=True, slots=True)
class Speedup:
    """``error``: the standard error due to the choice of answers and noise; None for a single lap."""

    value: float
    error: float | None
    num_answers: int  # measured


@dataclass(frozen=True, slots=True)
class NumLaps:
    """Laps per drafter: for all, and for those near the best while time is left."""

    every: int
    near_best: int


@dataclass(frozen=True, slots=True)
class Lap:
    """Answers that are measured whole, and others that fill free places until the last of those has ended."""

    measured: Sequence[Recording]
    others: Sequence[Recording] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Runs of the same answers with a drafter and without."""

    plain: Throughput
    drafted: Throughput


class PairedRuns:
    """Each drafter against the plain target, in seconds for the same answers, with ``batch`` requests running at all
    times.

    Answers are drawn at random, equally from all domains. As in a busy server, the next request starts when one ends,
    until all measured ones have ended. Prompts are in the target's cache. For every drafter the plain target serves the
    same answers in turn (``run_interleaved``). Each has its own cluster, which has served other answers before, so that
    drafters and the loop have learned as after a server's first minute. After the first laps only drafters near the
    best continue. Close it in the end.
    """

    def __init__(
        self,
        fixtures: Fixtures,
        configs: Sequence[DrafterConfig],
        recordings: Sequence[Recording],
        batch: int,
        turns: NumLaps,
    ) -> None:
        self._stable = fixtures
        self._turns = turns
        self._laps, served = laps(recordings, batch, turns.near_best)
        self._racing: dict[str, Served] = {}
        self._num_done = 0
        self._pairs: dict[str, list[Pair | None]] = {config.name: [] for config in configs}
        with ExitStack() as opened:
            self._plain = self._open(opened, None, batch, served)
            for config in configs:
                self._racing[config.name] = self._open(opened, config, batch, served)
            gc.collect()
            gc.freeze()  # as in a server's processes (`cluster.interpreter`)
            opened.callback(gc.unfreeze)
            self._opened = opened.pop_all()

    def _open(self, opened: ExitStack, config: DrafterConfig | None, batch: int, before: Sequence[Recording]) -> Served:
        served = Served(self._stable, config, batch)
        opened.callback(served.close)
        lane = served.begin(_requests(before), len(before))
        in_own_thread(lambda: run_interleaved([lane]))
        lane.end()
        return served

    def close(self) -> None:
        self._opened.close()

    @property
    def all_had_turns(self) -> bool:
        return self._num_done >= min(self._turns.every, len(self._laps))

    @property
    def is_over(self) -> bool:
        return self._num_done == len(self._laps)

    def step(self) -> dict[str, Pair]:
        """Runs one lap with all remaining drafters. Omits those that could not be measured."""
        lap = self._laps[self._num_done]
        requests, num_measured = _requests([*lap.measured, *lap.others]), len(lap.measured)
        for engine in dict.fromkeys(one.engine for one in (self._plain, *self._racing.values())):
            self._stable.cache_prompts(engine, requests)
        found = {}
        for name, one in self._racing.items():
            runs = [served.begin(requests, num_measured) for served in (self._plain, one)]
            in_own_thread(partial(run_interleaved, runs))
            plain, drafted = (lane.end() for lane in runs)
            pair = None if plain is None or drafted is None else Pair(plain, drafted)
            self._pairs[name].append(pair)
            if pair is not None:
                found[name] = pair
        self._num_done += 1
        if self._num_done == self._turns.every:
            values = {name: speedup.value for name, speedup in self.speedups().items()}
            near = near_best(values)
            self._racing = {name: one for name, one in self._racing.items() if name in near or name not in values}
        return found

    def speedups(self) -> dict[str, Speedup]:
        """Omits drafters without a measured lap."""
        found = {}
        for name, of_laps in self._pairs.items():
            pairs = [pair for pair in of_laps if pair is not None]
            if pairs:
                known = [pair is not None for pair in of_laps]
                num_answers = sum(len(lap.measured) for lap in itertools.compress(self._laps, known))
                found[name] = Speedup(ratio(pairs), jackknife(pairs), num_answers)
        return found


def near_best(values: Mapping[str, float]) -> list[str]:
    """The drafters that may be the fastest, as far as a few laps can tell."""
    best = max(values.values(), default=0.0)
    return [name for name, value in values.items() if value >= (1 - NEAR) * best]


def ratio(pairs: Sequence[Pair]) -> float:
    """Seconds for all tokens without drafters over those with a drafter, if the machine were equally fast in all laps."""
    share = sum(pair.plain.num_tokens * pair.drafted.s_per_token / pair.plain.s_per_token for pair in pairs)
    return sum(pair.plain.num_tokens for pair in pairs) / share


def jackknife(pairs: Sequence[Pair]) -> float | None:
    """The standard error of ``ratio`` (Tukey's jackknife over laps)."""
    num = len(pairs)
    if num < 2:
        return None
    without = [ratio([*pairs[:i], *pairs[i + 1 :]]) for i in range(num)]
    return math.sqrt((num - 1) * statistics.pvariance(without))


def sample(recordings: Sequence[Recording], num: int) -> list[Recording]:
    """At most ``num`` answers, drawn equally from all domains."""
    usable = [recording for recording in recordings if len(recording.output_token_ids) > 2] or list(recordings)
    return spread(random.Random(0).sample(usable, len(usable)), num)


def laps(recordings: Sequence[Recording], batch: int, num: int) -> tuple[list[Lap], list[Recording]]:
    """At most ``num`` laps, and warm-up answers; no answer is used twice.

    A lap has NUM_PER_PLACE answers for each of ``batch`` places. With few recordings there are fewer laps, or one of
    fewer answers, and none if the places cannot be filled.
    """
    drawn = sample(recordings, len(recordings))
    num_served = min(max(NUM_SERVED_BEFORE, 2 * batch), len(drawn) // 3)
    served, drawn = drawn[:num_served], drawn[num_served:]
    num_others = round(NUM_OTHERS_PER_PLACE * (batch - 1))
    num_measured = min(NUM_PER_PLACE * batch, len(drawn) - num_others)
    if num_measured < batch:
        return [], served
    size = num_measured + num_others
    starts = range(0, min(num, len(drawn) // size) * size, size)
    return [Lap(drawn[i : i + num_measured], drawn[i + num_measured : i + size]) for i in starts], served


def _requests(recordings: Sequence[Recording]) -> list[Request]:
    return [as_request(recording, order * 1e-6) for order, recording in enumerate(recordings)]
