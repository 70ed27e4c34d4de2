"""How fast answers come with drafters, and without: the whole engine, the real round, at a constant batch."""

import gc
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import DrafterConfig
from cluster.types import Request, RoutingTable
from deploy.bench.stable import Stable, as_request
from deploy.embedded import Completion, EmbeddedCluster, PoolEntry
from drafters.following import key_of
from drafters.replay import Recording
from profiler.prompts import spread
from router.planner import StepPlanner

DRAFT_LEN = 7
NUM_SERVED_BEFORE = 8  # answers at least that a cluster has served when its speed is measured
NEAR = 0.15  # below the best: about what the choice of a few answers does to a speed-up
_GOLDEN = 0.618  # multiples of it, taken modulo 1, are spread evenly however many they are


@dataclass(frozen=True, slots=True)
class Pace:
    """Decoded tokens, and the seconds that they took."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Speedup:
    """``error``: the standard error that the choice of answers, and the machine, leave; None of a single batch."""

    value: float
    error: float | None
    num_groups: int  # batches of answers that it was measured on


@dataclass(frozen=True, slots=True)
class Turns:
    """How many batches of answers speed is measured on: with every drafter, and, while there is time, with those near the
    best. ``num_tokens``: of an answer, at most."""

    every: int
    near_best: int
    num_tokens: int


class Race:
    """Each drafter against the plain target, in seconds for the same answers, a batch of them at a time.

    The answers are drawn at random, all domains alike, whatever their length; those of a batch are of like lengths. The
    plain target (twice) and the drafters take turns at every batch, each time in another order, so that what else the
    machine does hits all alike. Each has a cluster of its own, which has served other answers in such batches before: what a
    drafter, and the target's loop, learn of it is known after the first minute of a server's life. Once all have had their
    turns, only those near the best go on. Close it in the end.
    """

    def __init__(
        self, stable: Stable, configs: Sequence[DrafterConfig], recordings: Sequence[Recording], batch: int, turns: Turns
    ) -> None:
        self._turns = turns
        chosen, served = sample(recordings, batch * turns.near_best, max(NUM_SERVED_BEFORE, 2 * batch))
        groups = in_batches(chosen, batch)
        self._groups = random.Random(0).sample(groups, len(groups))  # the first of them hold answers of all lengths
        self._served = _Served(stable, None, batch)
        self._racing = {config.name: _Served(stable, config, batch) for config in configs}
        self._open = [self._served, *self._racing.values()]
        for warm in in_batches(served, batch):
            for one in self._open:
                one.measure(self._requests(warm))
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
        return len(self._plain) >= min(self._turns.every, len(self._groups))

    @property
    def is_over(self) -> bool:
        return len(self._plain) == len(self._groups)

    def step(self) -> None:
        """One batch, with whoever still races."""
        number = len(self._plain)
        requests = self._requests(self._groups[number])
        own: list[Pace | None] = []
        for name in in_turn(list(self._racing), number):
            pace = (self._served if name is None else self._racing[name]).measure(requests)
            (own if name is None else self._paces[name]).append(pace)
        known = [pace for pace in own if pace is not None]
        whole = Pace(sum(p.num_tokens for p in known), sum(p.seconds for p in known))
        self._plain.append(whole if len(known) == len(own) else None)
        if len(self._plain) == self._turns.every:
            values = {name: speedup.value for name, speedup in self.speedups().items()}
            near = near_best(values)
            self._racing = {name: one for name, one in self._racing.items() if name in near or name not in values}

    def speedups(self) -> dict[str, Speedup]:
        """Without those of which no batch could be measured."""
        found = {}
        for name, paces in self._paces.items():
            pairs = measured(self._plain, paces)
            if pairs:
                found[name] = Speedup(ratio(pairs), jackknife(pairs), len(pairs))
        return found

    def _requests(self, recordings: Sequence[Recording]) -> list[Request]:
        requests = [as_request(recording, order * 1e-6) for order, recording in enumerate(recordings)]
        return [replace(r, sampling=replace(r.sampling, max_tokens=self._max_tokens(r))) for r in requests]

    def _max_tokens(self, request: Request) -> int:
        return min(request.sampling.max_tokens, self._turns.num_tokens)


def in_turn(names: Sequence[str], number: int) -> list[str | None]:
    """The drafters and, twice, half of them apart, the plain target (None); each number begins elsewhere."""
    half = len(names) // 2
    ring = [None, *names[:half], None, *names[half:]]
    start = int(number * _GOLDEN % 1 * len(ring))
    return [*ring[start:], *ring[:start]]


def near_best(values: Mapping[str, float]) -> list[str]:
    """Which drafters may be the fastest, as far as a few batches can tell."""
    best = max(values.values(), default=0.0)
    return [name for name, value in values.items() if value >= (1 - NEAR) * best]


def measured(plain: Sequence[Pace | None], drafted: Sequence[Pace | None]) -> list[tuple[Pace, Pace]]:
    """Of the batches that ``drafted`` is of, those in which both could be measured."""
    return [(a, b) for a, b in zip(plain, drafted, strict=False) if a is not None and b is not None]


def ratio(pairs: Sequence[tuple[Pace, Pace]]) -> float:
    """Seconds for all tokens plainly over those with a drafter. Windows of both may hold a few tokens more or less."""
    took_s = sum(plain.num_tokens * drafted.seconds / drafted.num_tokens for plain, drafted in pairs)
    return sum(plain.seconds for plain, _ in pairs) / took_s


def jackknife(pairs: Sequence[tuple[Pace, Pace]]) -> float | None:
    """The standard error of ``ratio``, from what it is without each batch (Tukey's jackknife)."""
    num = len(pairs)
    if num < 2:
        return None
    without = [ratio([*pairs[:i], *pairs[i + 1 :]]) for i in range(num)]
    return math.sqrt((num - 1) * statistics.pvariance(without))


def sample(recordings: Sequence[Recording], num: int, num_others: int = 0) -> tuple[list[Recording], list[Recording]]:
    """``num`` answers drawn from all domains alike, and up to ``num_others`` others; where there are too few, fewer."""
    usable = [recording for recording in recordings if len(recording.output_token_ids) > 2] or list(recordings)
    drawn = spread(random.Random(0).sample(usable, len(usable)), num + num_others)
    return drawn[:num], drawn[num:]


def in_batches(recordings: Sequence[Recording], batch: int) -> list[list[Recording]]:
    """Answers of like lengths together, so that most of each is decoded before the first of a batch ends."""
    ordered = sorted(recordings, key=lambda recording: len(recording.output_token_ids))
    return [ordered[start : start + batch] for start in range(0, len(ordered), batch)]


class _Served:
    """A target with one drafter, or none, in a cluster that rests between measurements.

    The drafter runs on the target's thread, so both have the machine to themselves in turn. The target keeps its hidden
    states where the drafter reads them, and is the plain one for all others.
    """

    def __init__(self, stable: Stable, config: DrafterConfig | None, batch: int) -> None:
        engine = stable.target if config is not None and config.is_companion else stable.plain
        drafter = None if config is None else stable.make(config, time.monotonic)
        pool = {} if drafter is None else {"drafter": PoolEntry(drafter, DRAFT_LEN, capacity=batch, companion=True)}
        table = RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),), max_draft_len=DRAFT_LEN)
        self._drafter = drafter
        self._cluster = EmbeddedCluster(engine, stable.info, stable.cost, pool, StepPlanner(), table)
        self._cluster.pause()

    def measure(self, requests: Sequence[Request]) -> Pace | None:
        """Of ``requests`` at once. Prefill, which is the same with and without drafts, is left out: the clock runs from when
        all of them have their first token until the first of them ends. None: it ended before the last began."""
        self._cluster.resume()
        completions = self._cluster.complete(requests)
        self._cluster.pause()
        if self._drafter is not None:
            for request in requests:  # the last word of the target may not have come before its end
                self._drafter.release(key_of(0, request.id))
        return _window(completions)

    def close(self) -> None:
        self._cluster.close()


def _window(completions: Sequence[Completion]) -> Pace | None:
    """Tokens, and the seconds in which they were committed, while the whole batch was decoding; None where it never did."""
    start_s = max(completion.arrived_s[0] for completion in completions)
    end_s = min(completion.arrived_s[-1] for completion in completions)
    if end_s <= start_s:
        return None
    commits = [pair for c in completions for pair in zip(c.arrived_s, c.commits, strict=True)]
    return Pace(sum(len(commit.token_ids) for at_s, commit in commits if start_s < at_s <= end_s), end_s - start_s)
