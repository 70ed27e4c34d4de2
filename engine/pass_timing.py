"""Quick measurement of a target's pass times before it serves: the planner's first cost table."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from engine.target import TargetEngine
from engine.target_probe import TargetProbe
from profiler.stopwatch import OwnTime, Stopwatch
from router.cost_model import ROWS, TableCost, monotone

_CONTEXT_LEN = 512
_NUM_CONTEXTS = 2
_NUM_REPEATS = 5
_POINT_S = 0.25  # limit per point, beyond its first two passes
BUDGET_S = 5.0  # limit for all points after the first _MIN_POINTS, and again for the context
_MIN_POINTS = 3


def measure_cost(
    target: TargetEngine, clock: Callable[[], float] = time.monotonic, stopwatch: Stopwatch | None = None
) -> TableCost:
    """Measures step time over rows and per token of context on ``target``, which must hold no request. Takes the minimum of
    several repeats, since disturbances only add time. A slow machine measures as much as BUDGET_S allows."""
    start_s = clock()
    capacity, probe = target.capacity(), TargetProbe(target, stopwatch or OwnTime())
    points: list[tuple[int, float]] = []
    for rows in _measured_rows(capacity.prepared_rows):
        if not probe.fits(rows, 0):
            break
        spent_s = clock() - start_s
        if len(points) >= _MIN_POINTS and spent_s + 2 * monotone(points).step_s(rows, 0) > BUDGET_S:
            break
        points.append((rows, _least_s(partial(probe.step, rows, 0))))
    cost = monotone(points)
    num_contexts = min(_NUM_CONTEXTS, capacity.num_blocks * capacity.block_len // capacity.max_model_len)
    row_s = cost.step_s(_CONTEXT_LEN, 0) / _CONTEXT_LEN
    context_len = min(_CONTEXT_LEN, capacity.max_model_len - 2, int(BUDGET_S / (num_contexts * row_s)))
    if context_len < _CONTEXT_LEN // 4:
        return cost
    with_context_s = _least_s(partial(probe.verify, num_contexts, 1, context_len))
    return monotone(points, max(0.0, with_context_s - cost.step_s(num_contexts, 0)) / (num_contexts * context_len))


def _measured_rows(prepared: tuple[int, ...]) -> list[int]:
    """Time steps up after each prepared shape: within one by padding, which the planner adds, and after the last."""
    return sorted({*ROWS, *prepared, *[rows + 1 for rows in prepared[-1:]]})


def warm_up(target: TargetEngine, sizes: Sequence[int] = ROWS) -> None:
    """Runs one pass of each size, in rows, so that kernels, graphs and buffers exist before the first request. ``target``
    must hold no request. ``measure_cost`` does this too."""
    probe = TargetProbe(target, OwnTime())
    for num_rows in sizes:
        if probe.fits(num_rows, 0):
            probe.step(num_rows, 0)


def _least_s(measure: Callable[[], float]) -> float:
    """The minimum over repeats, after one pass that warms up this shape."""
    times_s: list[float] = []
    measure()
    while not times_s or (len(times_s) < _NUM_REPEATS and sum(times_s) < _POINT_S):
        times_s.append(measure())
    return min(times_s)
