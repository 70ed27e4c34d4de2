"""How fast answers come with drafters, and without: the whole engine, the real round, always so many requests under way."""

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import DrafterConfig
from cluster.errors import GenerationFailed
from cluster.types import FinishReason, Request, RoutingTable
from deploy.bench.stable import Stable, as_request
from deploy.embedded import Completion, EmbeddedCluster, PoolEntry
from drafters.following import key_of
from drafters.replay import Recording
from profiler.prompts import spread
from router.planner import StepPlanner

DRAFT_LEN = 7
NUM_SERVED_BEFORE = 4  # answers that a cluster has served when its speed is measured, or two for each place
NUM_PER_PLACE = 3  # so that answers begin and end all the time, not all at once
NUM_OTHERS_PER_PLACE = 2.5  # some places take two or three until the slowest answer of the others ends
NUM_PLAIN_RUNS = 3  # a lap
MAX_PLAIN_RUNS = 7  # as long as the two fastest do not agree
AGREEMENT = 0.1  # by which speeds of the same answers differ where nothing disturbs: runs of a lap were 1 to 11 % apart
NEAR = 0.15  # below the best: about what the choice of a few answers does to a speed-up
_GOLDEN = 0.618  # multiples of it, taken modulo 1, are spread evenly however many they are


@dataclass(frozen=True, slots=True)
class Pace:
    """Decoded tokens, and the seconds that they took."""

    num_tokens: int
    seconds: float

    @property
    def s_per_token(self) -> float:
        return self.seconds / self.num_tokens


@dataclass(frozen=True, slots=True)
class Speedup:
    """``error``: the standard error that the choice of answers, and the machine, leave; None of a single lap."""

    value: float
    error: float | None
    num_answers: int  # that it was measured on


@dataclass(frozen=True, slots=True)
class Turns:
    """On how many laps speed is measured: with every drafter, and, while there is time, with those near the best."""

    every: int
    near_best: int


@dataclass(frozen=True, slots=True)
class Lap:
    """Answers that are measured whole, and others for the places that fall free before the last of them has ended."""

    measured: Sequence[Recording]
    others: Sequence[Recording] = ()


class Race:
    """Each drafter against the plain target, in seconds for the same answers, ``batch`` of them under way at all times.

    The answers are drawn at random, all domains alike, whatever their length. Each that ends gives its place to the next, as
    in a busy server, until all that a lap measures have ended. Their prompts are in the target's cache before. The plain
    target (NUM_PLAIN_RUNS times or more, see ``plain_pace``) and the drafters take turns at every lap, in changing order. A
    drafter runs once a lap, for it learns; so something else on the machine can make it slow. Each has a cluster of its own,
    which has served other answers before: what a drafter, and the target's loop, learn of it is known after the first minute
    of a server's life. Once all have had their turns, only those near the best go on. Close it in the end.
    """

    def __init__(
        self, stable: Stable, configs: Sequence[DrafterConfig], recordings: Sequence[Recording], batch: int, turns: Turns
    ) -> None:
        self._stable = stable
        self._turns = turns
        self._laps, served = laps(recordings, batch, turns.near_best)
        self._served = _Served(stable, None, batch)
        self._racing = {config.name: _Served(stable, config, batch) for config in configs}
        self._open = [self._served, *self._racing.values()]
        warm_up = _requests(served)
        for one in self._open:
            one.measure(warm_up, len(warm_up))
        gc.collect()
        gc.freeze()  # as a server's processes do (`engine.garbage`)
        self._plain: list[Pace | None] = []
        self._paces: dict[str, list[Pace | None]] = {config.name: [] for config in configs}

    def close(self) -> None:
        for one in self._open:
            one.close()
        gc.unfreeze()

    @property
    def all_had_turns(self) -> bool:
        return len(self._plain) >= min(self._turns.every, len(self._laps))

    @property
    def is_over(self) -> bool:
        return len(self._plain) == len(self._laps)

    def step(self) -> Sequence[Pace | None]:
        """One lap, with whoever still races. Returns the plain runs: they lie apart where the machine is not quiet."""
        number = len(self._plain)
        lap = self._laps[number]
        requests, num_measured = _requests([*lap.measured, *lap.others]), len(lap.measured)
        for engine in dict.fromkeys(one.engine for one in (self._served, *self._racing.values())):
            self._stable.cache_prompts(engine, requests)
        own: list[Pace | None] = []
        for name in in_turn(list(self._racing), number):
            pace = (self._served if name is None else self._racing[name]).measure(requests, num_measured)
            (own if name is None else self._paces[name]).append(pace)
        while None not in own and not fastest_agree(own) and len(own) < MAX_PLAIN_RUNS:
            own.append(self._served.measure(requests, num_measured))
        self._plain.append(plain_pace(own))
        if len(self._plain) == self._turns.every:
            values = {name: speedup.value for name, speedup in self.speedups().items()}
            near = near_best(values)
            self._racing = {name: one for name, one in self._racing.items() if name in near or name not in values}
        return own

    def speedups(self) -> dict[str, Speedup]:
        """Without those of which no lap could be measured."""
        found = {}
        for name, paces in self._paces.items():
            pairs = measured(self._plain, paces)
            if pairs:
                known = [None not in both for both in zip(self._plain, paces, strict=False)]
                num_answers = sum(len(lap.measured) for lap in itertools.compress(self._laps, known))
                found[name] = Speedup(ratio(pairs), jackknife(pairs), num_answers)
        return found


def in_turn(names: Sequence[str], number: int) -> list[str | None]:
    """The drafters and, NUM_PLAIN_RUNS times among them, the plain target (None); each number begins elsewhere."""
    ring: list[str | None] = []
    for i in range(NUM_PLAIN_RUNS):
        ring += [None, *names[i * len(names) // NUM_PLAIN_RUNS : (i + 1) * len(names) // NUM_PLAIN_RUNS]]
    start = int(number * _GOLDEN % 1 * len(ring))
    return [*ring[start:], *ring[:start]]


def fastest_agree(paces: Sequence[Pace | None]) -> bool:
    """Whether the two fastest lie together. Of fewer than two runs nothing can be said, and they do not."""
    known = _fastest_first(paces)
    return len(known) > 1 and known[1].s_per_token <= (1 + AGREEMENT) * known[0].s_per_token


def plain_pace(paces: Sequence[Pace | None]) -> Pace | None:
    """What counts of a lap's plain runs; None where one could not be measured.

    Whatever else the machine does makes a run slower, not faster. So it is the second fastest, which of three undisturbed
    runs is the median, if that lies near the fastest; and else the fastest, in favour of the plain target. What is not seen
    is a lap whose runs were all disturbed, and alike.
    """
    known = _fastest_first(paces)
    if len(known) < max(1, len(paces)):
        return None
    return known[1 if fastest_agree(known) else 0]


def _fastest_first(paces: Sequence[Pace | None]) -> list[Pace]:
    return sorted((pace for pace in paces if pace is not None), key=lambda pace: pace.s_per_token)


def near_best(values: Mapping[str, float]) -> list[str]:
    """Which drafters may be the fastest, as far as a few laps can tell."""
    best = max(values.values(), default=0.0)
    return [name for name, value in values.items() if value >= (1 - NEAR) * best]


def measured(plain: Sequence[Pace | None], drafted: Sequence[Pace | None]) -> list[tuple[Pace, Pace]]:
    """Of the laps that ``drafted`` is of, those in which both could be measured."""
    return [(a, b) for a, b in zip(plain, drafted, strict=False) if a is not None and b is not None]


def ratio(pairs: Sequence[tuple[Pace, Pace]]) -> float:
    """Seconds for all tokens plainly over those with a drafter. Laps of both may hold a few tokens more or less."""
    took_s = sum(plain.num_tokens * drafted.seconds / drafted.num_tokens for plain, drafted in pairs)
    return sum(plain.seconds for plain, _ in pairs) / took_s


def jackknife(pairs: Sequence[tuple[Pace, Pace]]) -> float | None:
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


class _Served:
    """A target with one drafter, or none, in a cluster that rests between measurements.

    The drafter runs on the target's thread, so both have the machine to themselves in turn. The target keeps its hidden
    states where the drafter reads them, and is the plain one for all others.
    """

    def __init__(self, stable: Stable, config: DrafterConfig | None, batch: int) -> None:
        self.engine = stable.target if config is not None and config.is_companion else stable.plain
        drafter = None if config is None else stable.make(config, time.monotonic)
        pool = {} if drafter is None else {"drafter": PoolEntry(drafter, DRAFT_LEN, capacity=batch, companion=True)}
        table = RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),), max_draft_len=DRAFT_LEN)
        self._batch = batch
        self._drafter = drafter
        self._cluster = EmbeddedCluster(self.engine, stable.info, stable.cost, pool, StepPlanner(), table)
        self._cluster.pause()

    def measure(self, requests: Sequence[Request], num_measured: int) -> Pace | None:
        """Of ``requests`` in order, until the first ``num_measured`` have ended. None: nobody was decoding.

        Raises:
            GenerationFailed: one of those failed, or the drafter did and was left out.
        """
        self._cluster.resume()
        completions = self._cluster.complete(requests, self._batch, num_measured)
        followed = dict(self._cluster.loop.status().followed)
        self._cluster.pause()
        for request, completion in zip(requests[:num_measured], completions, strict=False):
            last = completion.commits[-1]
            if last.finish not in (FinishReason.STOP, FinishReason.LENGTH):
                raise GenerationFailed(f"request {request.id}: {last.error or last.finish}")
        if self._drafter is not None and "drafter" not in followed:
            raise GenerationFailed("the drafter failed; its error is in the log")
        if self._drafter is not None:
            for request in requests:  # the last word of the target may not have come before its end
                self._drafter.release(key_of(0, request.id))
        return pace_of(completions, self._batch, num_measured)

    def close(self) -> None:
        self._cluster.close()


def pace_of(completions: Sequence[Completion], num_alive: int, num_measured: int) -> Pace | None:
    """Tokens, and the seconds in which they were committed: from when the first ``num_alive`` all have their first token
    until the last of the first ``num_measured`` ends, whoever decodes then. None where nobody did.

    Commits of one pass arrive one after another, so a few of the last pass may be left out, of thousands.
    """
    measured = completions[:num_measured]
    start_s = max((completion.arrived_s[0] for completion in measured[:num_alive]), default=0.0)
    end_s = max((completion.arrived_s[-1] for completion in measured), default=0.0)
    if end_s <= start_s:
        return None
    commits = [pair for c in completions for pair in zip(c.arrived_s, c.commits, strict=True)]
    return Pace(sum(len(commit.token_ids) for at_s, commit in commits if start_s < at_s <= end_s), end_s - start_s)
