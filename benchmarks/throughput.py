"""How fast answers come with drafters, and without: the whole engine, the real round, always so many requests under way."""

import gc
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.fixtures import Fixtures, as_request
from benchmarks.interleaved import Pace, Served, side_by_side
from benchmarks.prompts import spread
from cluster.config import DrafterConfig
from cluster.types import Request
from drafters.replay import Recording

NUM_SERVED_BEFORE = 4  # answers that a cluster has served when its speed is measured, or two for each place
NUM_PER_PLACE = 3  # so that answers begin and end all the time, not all at once
NUM_OTHERS_PER_PLACE = 2.5  # some places take two or three until the slowest answer of the others ends
NEAR = 0.15  # below the best: about what the choice of a few answers does to a speed-up


@dataclass(frozen=True, slots=True)
class Speedup:
    """``error``: the standard error that the choice of answers, and the machine, leave; None of a single lap."""

    value: float
    error: float | None
    num_answers: int  # that it was measured on


@dataclass(frozen=True, slots=True)
class ThroughputTurns:
    """On how many laps speed is measured: with every drafter, and, while there is time, with those near the best."""

    every: int
    near_best: int


@dataclass(frozen=True, slots=True)
class Lap:
    """Answers that are measured whole, and others for the places that fall free before the last of them has ended."""

    measured: Sequence[Recording]
    others: Sequence[Recording] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Of the same answers, side by side."""

    plain: Pace
    drafted: Pace


class PairedRuns:
    """Each drafter against the plain target, in seconds for the same answers, ``batch`` of them under way at all times.

    The answers are drawn at random, all domains alike, whatever their length. Each that ends gives its place to the next, as
    in a busy server, until all that a lap measures have ended. Their prompts are in the target's cache before. With every
    drafter the plain target serves them once more, see ``side_by_side``. Each has a cluster of its own, which has served
    other answers before: what a drafter, and the target's loop, learn of it is known after the first minute of a server's
    life. Once all have had their turns, only those near the best go on. Close it in the end.
    """

    def __init__(
        self,
        stable: Fixtures,
        configs: Sequence[DrafterConfig],
        recordings: Sequence[Recording],
        batch: int,
        turns: ThroughputTurns,
    ) -> None:
        self._stable = stable
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
            gc.freeze()  # as a server's processes do (`engine.garbage`)
            opened.callback(gc.unfreeze)
            self._opened = opened.pop_all()

    def _open(self, opened: ExitStack, config: DrafterConfig | None, batch: int, before: Sequence[Recording]) -> Served:
        served = Served(self._stable, config, batch)
        opened.callback(served.close)
        lane = served.begin(_requests(before), len(before))
        side_by_side([lane])
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
        """One lap, with whoever still races. Without those of whom it could not be measured."""
        lap = self._laps[self._num_done]
        requests, num_measured = _requests([*lap.measured, *lap.others]), len(lap.measured)
        for engine in dict.fromkeys(one.engine for one in (self._plain, *self._racing.values())):
            self._stable.cache_prompts(engine, requests)
        found = {}
        for name, one in self._racing.items():
            lanes = [served.begin(requests, num_measured) for served in (self._plain, one)]
            side_by_side(lanes)
            plain, drafted = (lane.end() for lane in lanes)
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
        """Without those of which no lap could be measured."""
        found = {}
        for name, of_laps in self._pairs.items():
            pairs = [pair for pair in of_laps if pair is not None]
            if pairs:
                known = [pair is not None for pair in of_laps]
                num_answers = sum(len(lap.measured) for lap in itertools.compress(self._laps, known))
                found[name] = Speedup(ratio(pairs), jackknife(pairs), num_answers)
        return found


def near_best(values: Mapping[str, float]) -> list[str]:
    """Which drafters may be the fastest, as far as a few laps can tell."""
    best = max(values.values(), default=0.0)
    return [name for name, value in values.items() if value >= (1 - NEAR) * best]


def ratio(pairs: Sequence[Pair]) -> float:
    """Seconds for all tokens plainly over those with a drafter, on a machine that is as fast in every lap."""
    share = sum(pair.plain.num_tokens * pair.drafted.s_per_token / pair.plain.s_per_token for pair in pairs)
    return sum(pair.plain.num_tokens for pair in pairs) / share


def jackknife(pairs: Sequence[Pair]) -> float | None:
    """The standard error of ``ratio``, from what it is without each lap (Tukey's jackknife)."""
    num = len(pairs)
    if num < 2:
        return None
    without = [ratio([*pairs[:i], *pairs[i + 1 :]]) for i in range(num)]
    return math.sqrt((num - 1) * statistics.pvariance(without))


def sample(recordings: Sequence[Recording], num: int) -> list[Recording]:
    """``num`` answers drawn from all domains alike; where there are too few, fewer."""
    usable = [recording for recording in recordings if len(recording.output_token_ids) > 2] or list(recordings)
    return spread(random.Random(0).sample(usable, len(usable)), num)


def laps(recordings: Sequence[Recording], batch: int, num: int) -> tuple[list[Lap], list[Recording]]:
    """At most ``num`` laps, and answers that are served before them; no answer is in two places.

    A lap has NUM_PER_PLACE answers for each of ``batch`` places. Of few recordings there are fewer laps, or a single one of
    fewer answers, and none of too few to keep all places taken.
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
