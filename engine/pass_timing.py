"""Quick measurement of a target's pass times before it serves: the planner's first cost table.

Other programs start when a target does, and slow it for seconds. Passes of one size, one after the other, would all be slow:
drafts of that size would seem not to pay, and no pass of requests would show otherwise. So sizes take turns, the least of
several passes counts, and a size takes at most as long as any larger one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from math import inf

from engine.native import NativeTarget
from engine.target import TargetEngine
from engine.target_probe import TargetProbe
from profiler.interleaved import OwnTime, Stopwatch
from router.cost_model import ROWS, TableCost, bounded

_CONTEXT_LEN = 512
_FEW_CONTEXTS, _MOST_CONTEXTS = 2, 16
_NUM_REPEATS = 5
_POINT_S = 0.25  # a size is not repeated beyond it, after its second pass
BUDGET_S = 5.0  # limit for all points after the first _MIN_POINTS
_CONTEXT_S = 2.5  # limit for computing the contexts of a pass
_PAIRS_S, _MOST_PAIRS = 1.0, 30  # of passes with and without them, after the first
_REPEATS_S = 2.5  # beyond BUDGET_S, after which nothing is repeated
_MIN_POINTS = 3
CHECK_S = 1.0  # limit of a check, beyond its first two sizes
_CHECKED = (1, 2, 4, 8, 16)  # rows: a few requests with their drafts
_NUM_CHECKS = 2  # in turns
_STEEPER = 1.5  # chosen: 3 ended drafting, and five undisturbed measurements (level amx) differ by 1.2


def measure_cost(
    target: TargetEngine, clock: Callable[[], float] = time.monotonic, stopwatch: Stopwatch | None = None
) -> TableCost:
    """Measures step time over rows and per token of context on ``target``, which must hold no request. A slow machine
    measures fewer sizes, and repeats less."""
    start_s = clock()
    capacity, probe = target.capacity(), TargetProbe(target, stopwatch or OwnTime())
    times_s: dict[int, list[float]] = {}
    for rows in _measured_rows(capacity.prepared_rows):
        if not probe.fits(rows, 0):
            break
        spent_s = clock() - start_s
        if len(times_s) >= _MIN_POINTS and spent_s + 2 * _least(times_s).step_s(rows, 0) > BUDGET_S:
            break
        probe.step(rows, 0)  # warms up this shape
        times_s[rows] = [probe.step(rows, 0)]
    for _ in range(_NUM_REPEATS - 1):
        for rows, found in times_s.items():
            is_enough = len(found) > 1 and len(found) * min(found) >= _POINT_S
            if not is_enough and clock() - start_s < BUDGET_S + _REPEATS_S:
                found.append(probe.step(rows, 0))
    cost = _least(times_s)
    if not capacity.prepared_rows:  # behind the last prepared shape passes do take many times as long
        cost = bounded(cost)
    most = min(
        _MOST_CONTEXTS, capacity.max_num_sequences, capacity.num_blocks * capacity.block_len // capacity.max_model_len
    )
    row_s = cost.step_s(_CONTEXT_LEN, 0) / _CONTEXT_LEN
    context_len = min(_CONTEXT_LEN, capacity.max_model_len - 2, int(_CONTEXT_S / (_FEW_CONTEXTS * row_s)))
    if context_len < _CONTEXT_LEN // 4:
        return cost
    # A context takes little of a pass over a few: the more there are, the less disturbances count.
    num_contexts = max(1, min(most, int(_CONTEXT_S / (context_len * row_s))))
    for context in (0, context_len):  # warms up the shapes, and caches the contexts
        probe.verify(num_contexts, 1, context)
    without_s, with_s, end_s = inf, inf, clock() + _PAIRS_S
    for number in range(_MOST_PAIRS):
        if number and clock() >= end_s:
            break
        without_s = min(without_s, probe.verify(num_contexts, 1, 0))
        with_s = min(with_s, probe.verify(num_contexts, 1, context_len))
    return replace(cost, per_context_s=max(0.0, with_s - without_s) / (num_contexts * context_len))


def is_too_steep(
    known: TableCost, target: TargetEngine, clock: Callable[[], float] = time.monotonic, stopwatch: Stopwatch | None = None
) -> bool:
    """Whether stored times rise more than _STEEPER times as fast with the rows as a few passes do, of 1 to 16 rows: other
    programs probably ran when they were measured. Takes about CHECK_S.

    Times that are all too long, or all too short, are corrected by the passes of requests (``OnlineCost``). ``target`` must
    be warm at one row, and hold no request.
    """
    end_s, probe = clock() + CHECK_S, TargetProbe(target, stopwatch or OwnTime())
    found_s: dict[int, float] = {}
    for _ in range(_NUM_CHECKS):
        for rows in _CHECKED:
            if (len(found_s) > 1 and clock() >= end_s) or rows > known.rows[-1] or not probe.fits(rows, 0):
                break
            found_s[rows] = min(found_s.get(rows, inf), probe.step(rows, 0))
    one_s, known_one_s = found_s[1], known.at(1)
    return any(known.at(rows) / known_one_s > _STEEPER * least_s / one_s for rows, least_s in found_s.items())


def _measured_rows(prepared: tuple[int, ...]) -> list[int]:
    """Time steps up after each prepared shape: within one by padding, which the planner adds, and after the last."""
    return sorted({*ROWS, *prepared, *[rows + 1 for rows in prepared[-1:]]})


def warm_up(target: TargetEngine, sizes: Sequence[int] = ROWS) -> None:
    """Runs one plain pass of each size, in rows, so that kernels, graphs and buffers exist before the first request.
    ``target`` must hold no request. ``measure_cost`` does this too."""
    probe = TargetProbe(target, OwnTime())
    with target.without_exits() if isinstance(target, NativeTarget) else nullcontext():  # whose passes replay no graph
        for num_rows in sizes:
            if probe.fits(num_rows, 0):
                probe.step(num_rows, 0)


def _least(times_s: Mapping[int, Sequence[float]]) -> TableCost:
    """By rows in ascending order. Disturbances only add time, so that a size takes at most as long as any larger one."""
    seconds = [min(found) for found in times_s.values()]
    return TableCost(tuple(times_s), tuple(accumulate(reversed(seconds), min))[::-1])
