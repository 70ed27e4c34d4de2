"""How fast answers come with drafters, and without: the whole engine, the real round, at a constant batch."""

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import DrafterConfig
from cluster.types import Request, RoutingTable
from deploy.bench.stable import Stable, as_request
from deploy.embedded import Completion, EmbeddedCluster, PoolEntry
from drafters.following import key_of
from drafters.protocol import Drafter
from drafters.replay import Recording
from profiler.prompts import spread
from router.planner import StepPlanner

DRAFT_LEN = 7
NUM_SERVED_BEFORE = 8  # answers that a drafter has seen when its speed is measured


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


def speedups(
    stable: Stable, configs: Sequence[DrafterConfig], recordings: Sequence[Recording], batch: int, num_groups: int
) -> dict[str, Speedup]:
    """Of each drafter over the plain target, in seconds for the same answers, ``num_groups`` batches of them.

    The answers are drawn at random, all domains alike, whatever their length; those of a batch are of like lengths. The
    plain target (twice) and the drafters take turns at every batch, each time in another order, so that what else the
    machine does hits all alike. Drafters have served other answers before, as any but the first minute of a server's life
    has seen.
    """
    chosen, served = sample(recordings, batch * num_groups)
    groups = in_batches(chosen, batch)
    drafters: dict[str | None, Drafter | None] = {config.name: stable.make(config, time.monotonic) for config in configs}
    for drafter in filter(None, drafters.values() if served else ()):
        measure(stable, [as_request(recording, order * 1e-6) for order, recording in enumerate(served)], drafter)
    half = len(configs) // 2
    names = [None, *(c.name for c in configs[:half]), None, *(c.name for c in configs[half:])]
    drafters[None] = None
    plain: list[Pace] = []
    paces: dict[str, list[Pace]] = {config.name: [] for config in configs}
    for number, group in enumerate(groups):
        requests = [as_request(recording, order * 1e-6) for order, recording in enumerate(group)]
        turn = number * len(names) // len(groups)
        own = []
        for name in (*names[turn:], *names[:turn]):
            pace = measure(stable, requests, drafters[name])
            if name is None:
                own.append(pace)
            else:
                paces[name].append(pace)
        plain.append(Pace(sum(p.num_tokens for p in own), sum(p.seconds for p in own)))
    return {name: Speedup(ratio(plain, found), jackknife(plain, found)) for name, found in paces.items()}


def jackknife(plain: Sequence[Pace], drafted: Sequence[Pace]) -> float | None:
    """The standard error of ``ratio``, from what it is without each batch (Tukey's jackknife)."""
    num = len(plain)
    if num < 2:
        return None
    without = [ratio([*plain[:i], *plain[i + 1 :]], [*drafted[:i], *drafted[i + 1 :]]) for i in range(num)]
    return math.sqrt((num - 1) * statistics.pvariance(without))


def ratio(plain: Sequence[Pace], drafted: Sequence[Pace]) -> float:
    """Seconds for all tokens plainly over those with a drafter. Windows of both may hold a few tokens more or less."""
    took_s = sum(a.num_tokens * b.seconds / b.num_tokens for a, b in zip(plain, drafted, strict=True))
    return sum(a.seconds for a in plain) / took_s


def sample(recordings: Sequence[Recording], num: int) -> tuple[list[Recording], list[Recording]]:
    """``num`` answers drawn from all domains alike, and up to NUM_SERVED_BEFORE others; where there are too few, fewer."""
    usable = [recording for recording in recordings if len(recording.output_token_ids) > 2] or list(recordings)
    drawn = spread(random.Random(0).sample(usable, len(usable)), num + NUM_SERVED_BEFORE)
    return drawn[:num], drawn[num:]


def in_batches(recordings: Sequence[Recording], batch: int) -> list[list[Recording]]:
    """Answers of like lengths together, so that most of each is decoded before the first of a batch ends."""
    ordered = sorted(recordings, key=lambda recording: len(recording.output_token_ids))
    return [ordered[start : start + batch] for start in range(0, len(ordered), batch)]


def measure(stable: Stable, requests: Sequence[Request], drafter: Drafter | None) -> Pace:
    """Of ``requests`` at once. Prefill, which is the same with and without drafts, is left out: the clock runs from when all
    of them have their first token until the first of them ends.

    The drafter runs on the target's thread, so both have the machine to themselves in turn.
    """
    engine = stable.target if drafter is not None else stable.plain
    pool = {} if drafter is None else {"drafter": PoolEntry(drafter, DRAFT_LEN, capacity=len(requests), companion=True)}
    table = RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),), max_draft_len=DRAFT_LEN)
    with EmbeddedCluster(engine, stable.info, stable.cost, pool, StepPlanner(), table) as cluster:
        completions = cluster.complete(requests)
    if drafter is not None:
        for request in requests:  # the last word of the target may not have come before its end
            drafter.release(key_of(0, request.id))
    return _window(completions)


def _window(completions: Sequence[Completion]) -> Pace:
    """Tokens, and the seconds in which they were committed, while the whole batch was decoding."""
    start_s = max(completion.arrived_s[0] for completion in completions)
    end_s = min(completion.arrived_s[-1] for completion in completions)
    if end_s <= start_s:  # the answers are so short that one ended before the last began
        start_s, end_s = (pick(c.arrived_s[i] for c in completions) for pick, i in ((min, 0), (max, -1)))
    commits = [pair for c in completions for pair in zip(c.arrived_s, c.commits, strict=True)]
    return Pace(sum(len(commit.token_ids) for at_s, commit in commits if start_s < at_s <= end_s), end_s - start_s)
