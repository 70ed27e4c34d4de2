"""Quick measurement of a target's pass times before it serves: the planner's first cost table."""

import time
from collections.abc import Callable, Sequence

from cluster.types import Request, SamplingParams
from engine.target import SpanInput, TargetEngine
from router.cost_model import TableCost, monotone

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # extrapolated beyond
_CONTEXT_LEN = 512
_NUM_CONTEXTS = 2
_NUM_REPEATS = 5
_POINT_S = 0.25  # limit per point, beyond its first two passes
BUDGET_S = 5.0  # limit for all points after the first _LEAST_POINTS, and again for the context
_LEAST_POINTS = 3


def measure_cost(target: TargetEngine, clock: Callable[[], float] = time.monotonic) -> TableCost:
    """Measures step time over rows and per token of context on ``target``, which must hold no request.

    Takes the minimum of several repeats, since disturbances only add time. A slow machine measures fewer rows and less
    context, as far as BUDGET_S allows for each.

    Args:
        clock: of the budget.
    """
    start_s = clock()
    capacity = target.capacity()
    points: list[tuple[int, float]] = []
    for rows in ROWS:
        if rows > min(capacity.max_pass_tokens, capacity.max_model_len):
            break
        spent_s = clock() - start_s
        if len(points) >= _LEAST_POINTS and spent_s + 2 * monotone(points).step_s(rows, 0) > BUDGET_S:
            break
        points.append((rows, _rows_s(target, rows)))
    num_contexts = min(_NUM_CONTEXTS, capacity.num_blocks * capacity.block_len // capacity.max_model_len)
    context_len = min(_CONTEXT_LEN, capacity.max_model_len - _NUM_REPEATS - 2)
    row_s = monotone(points).step_s(_CONTEXT_LEN, 0) / _CONTEXT_LEN
    context_len = min(context_len, int(BUDGET_S / (num_contexts * row_s)))
    if context_len < _CONTEXT_LEN // 4:
        return monotone(points)
    with_context_s = _context_s(target, context_len, num_contexts, capacity.max_pass_tokens)
    without_s = monotone(points).step_s(num_contexts, 0)
    return monotone(points, max(0.0, with_context_s - without_s) / (num_contexts * context_len))


def warm_up(target: TargetEngine, sizes: Sequence[int] = ROWS) -> None:
    """Runs one pass of each size, in rows, so that kernels, graphs and buffers exist before the first request.

    ``target`` must hold no request. ``measure_cost`` does this too.
    """
    capacity = target.capacity()
    for num_rows in sizes:
        if num_rows <= min(capacity.max_pass_tokens, capacity.max_model_len):
            _one_span_s(target, num_rows)


def _rows_s(target: TargetEngine, num_rows: int) -> float:
    """One verify span of ``num_rows`` rows, all sampled, on an empty context."""
    return _least_s(lambda _: _one_span_s(target, num_rows))


def _one_span_s(target: TargetEngine, num_rows: int) -> float:
    request = _request(0)
    target.open(request, (0,))
    elapsed_s = _timed_s(target, [SpanInput(request.id, 0, (0,) * num_rows, num_drafts=num_rows - 1)])
    target.release(request.id)
    return elapsed_s


def _context_s(target: TargetEngine, context_len: int, num_sequences: int, max_pass_tokens: int) -> float:
    """One row for each of ``num_sequences`` sequences of ``context_len`` tokens, which share no blocks."""
    requests = [_request(i) for i in range(num_sequences)]
    for i, request in enumerate(requests):
        token_ids = (i,) * context_len
        base_len = target.open(request, token_ids)
        while base_len < context_len:
            chunk = token_ids[base_len : base_len + max_pass_tokens]
            target.execute([SpanInput(request.id, base_len, chunk, samples=False)])
            base_len += len(chunk)

    def one_pass(step: int) -> float:
        return _timed_s(target, [SpanInput(request.id, context_len + step, (0,)) for request in requests])

    least_s = _least_s(one_pass)
    for request in requests:
        target.release(request.id)
    return least_s


def _least_s(one_pass: Callable[[int], float]) -> float:
    """The minimum over repeats, after one pass that warms up this shape."""
    one_pass(0)
    times_s = [one_pass(1)]
    while len(times_s) < _NUM_REPEATS and sum(times_s) < _POINT_S:
        times_s.append(one_pass(len(times_s) + 1))
    return min(times_s)


def _timed_s(target: TargetEngine, spans: Sequence[SpanInput]) -> float:
    start_s = time.perf_counter()
    target.execute(spans)
    return time.perf_counter() - start_s


def _request(index: int) -> Request:
    return Request(f"calibration-{index}", (index,), SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0)
