"""A quick measurement of what a target's pass costs, taken before it serves: the planner's first cost table."""

import time
from collections.abc import Sequence

from cluster.types import Request, SamplingParams
from engine.target import SpanInput, TargetEngine
from router.cost_model import TableCost, monotone

ROWS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT_LEN = 512
_NUM_CONTEXTS = 2
_NUM_REPEATS = 5


def measure_cost(target: TargetEngine) -> TableCost:
    """Step time over rows, and per token of context, by running passes on ``target``, which must hold no request.

    The least of several repeats is taken: what disturbs a measurement only ever adds to it. Takes about a second for
    SmolLM2-135M on two cores.
    """
    capacity = target.capacity()
    num_rows = [rows for rows in ROWS if rows <= min(capacity.max_pass_tokens, capacity.max_model_len)]
    points = [(rows, _rows_s(target, rows)) for rows in num_rows]
    context_len = min(_CONTEXT_LEN, capacity.max_model_len - _NUM_REPEATS - 1)
    num_contexts = min(_NUM_CONTEXTS, capacity.num_blocks * capacity.block_len // capacity.max_model_len)
    if context_len < _CONTEXT_LEN // 4:
        return monotone(points)
    with_context_s = _context_s(target, context_len, num_contexts, capacity.max_pass_tokens)
    without_s = monotone(points).step_s(num_contexts, 0)
    return monotone(points, max(0.0, with_context_s - without_s) / (num_contexts * context_len))


def _rows_s(target: TargetEngine, num_rows: int) -> float:
    """One verify span of ``num_rows`` rows, all sampled, on an empty context."""
    times_s = []
    for _ in range(_NUM_REPEATS + 1):
        target.open(_request(0), (0,))
        span = SpanInput(_request(0).id, 0, (0,) * num_rows, num_drafts=num_rows - 1)
        times_s.append(_timed_s(target, [span]))
        target.release(span.request_id)
    return min(times_s)


def _context_s(target: TargetEngine, context_len: int, num_sequences: int, max_pass_tokens: int) -> float:
    """One row for each of ``num_sequences`` sequences of ``context_len`` tokens. They differ, lest they share blocks."""
    requests = [_request(i) for i in range(num_sequences)]
    for i, request in enumerate(requests):
        token_ids = (i,) * context_len
        base_len = target.open(request, token_ids)
        while base_len < context_len:
            chunk = token_ids[base_len : base_len + max_pass_tokens]
            target.execute([SpanInput(request.id, base_len, chunk, samples=False)])
            base_len += len(chunk)
    times_s = [
        _timed_s(target, [SpanInput(request.id, context_len + step, (0,)) for request in requests])
        for step in range(_NUM_REPEATS)
    ]
    for request in requests:
        target.release(request.id)
    return min(times_s)


def _timed_s(target: TargetEngine, spans: Sequence[SpanInput]) -> float:
    start_s = time.perf_counter()
    target.execute(spans)
    return time.perf_counter() - start_s


def _request(index: int) -> Request:
    return Request(f"calibration-{index}", (index,), SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0)
