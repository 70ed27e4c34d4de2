"""Timed single passes of a target over given numbers of rows and context, for profiles."""

import itertools
from collections.abc import Sequence

from cluster.sampling_params import SamplingParams
from cluster.types import Request
from engine.target import TargetEngine, compute
from profiler.interleaved import Stopwatch
from router.cost_model import ROWS
from router.plan import Span

CONTEXTS = (0, 512, 2048, 8192, 32768)
CHUNKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_ROWS_PER_SEQUENCE = 2  # between a decode step (1) and a verification (a few)
_CACHE_SHARE = 4  # the measured context is at most this part of the cache, so that it stays cached between passes

_LAST = 2  # a token that occurs in no context
_MORE_ROWS = (1024, 2048, 4096, 8192)

Grid = list[tuple[int, int]]


class TargetProbe:
    """``target`` must hold no request, and holds none between two passes. Contexts are computed outside the measured time,
    and once where the target caches prefixes. ``max_rows``: per pass; larger passes are extrapolated.

    An engine that schedules for itself may verify no drafts in the pass that admits a request. So a token is computed of
    each request before its measured pass: contexts are that token longer than asked for.
    """

    def __init__(self, target: TargetEngine, stopwatch: Stopwatch, max_rows: int | None = None) -> None:
        self._target = target
        self._stopwatch = stopwatch
        self._capacity = target.capacity()
        self._max_rows = min(self._capacity.max_pass_tokens, max_rows or self._capacity.max_pass_tokens)
        self._fresh = itertools.count()
        self._numbers = itertools.count()

    def pass_grid(self) -> Grid:
        """The measurable pairs (rows, context)."""
        most = self._capacity.num_blocks * self._capacity.block_len // _CACHE_SHARE
        rows = [rows for rows in (*ROWS, *_MORE_ROWS) if rows <= self._max_rows]
        return [(r, context) for context in CONTEXTS if context <= most for r in rows if self.fits(r, context)]

    def fits(self, num_rows: int, context: int) -> bool:
        """Whether ``step`` can measure it."""
        num_sequences, rows_each = self._shape(num_rows)
        longest = context // num_sequences + 1 + rows_each
        return num_rows <= self._max_rows and longest <= self._capacity.max_model_len

    def prefill_grid(self) -> Grid:
        """(rows of a chunk, context before it)."""
        longest = self._capacity.max_model_len - 1
        return [(c, before) for c in CHUNKS for before in CONTEXTS if c <= self._max_rows and c + before <= longest]

    def step(self, num_rows: int, context: int) -> float:
        """Seconds of a verifying pass whose rows and context are spread evenly over sequences."""
        num_sequences, rows_each = self._shape(num_rows)
        return self.verify(num_sequences, rows_each, self._whole_blocks(context // num_sequences))

    def verify(self, num_sequences: int, rows_each: int, context_each: int) -> float:
        """Seconds of a pass with a verify span of ``rows_each`` rows for each sequence."""
        requests = [_request(f"{next(self._numbers)}") for _ in range(num_sequences)]
        for i, request in enumerate(requests):
            own = (i % 2**8, i // 2**8, *(0,) * max(0, context_each - 2))[:context_each]
            self._hold(request, own, (_LAST,))
        firsts = self._target.execute([Span.bound(request.id, context_each, (_LAST,)) for request in requests])
        drafts = (0,) * (rows_each - 1)
        spans = [Span.bound(o.request_id, context_each + 1, (*o.chosen, *drafts), len(drafts)) for o in firsts]
        return self._timed(requests, spans)

    def prefill(self, num_rows: int, context: int) -> float:
        """Seconds of a pass over an uncached chunk of a prompt."""
        before = self._whole_blocks(context)
        request = _request(f"{next(self._numbers)}")
        while True:
            number = next(self._fresh)
            chunk = (number % 2**8, number // 2**8 % 2**8, number // 2**16, *(_LAST,) * (num_rows - 3))
            if self._hold(request, (1,) * before, (*chunk, _LAST)) == before:
                return self._timed([request], [Span.bound(request.id, before, chunk, samples=False)])
            self._target.release(request.id)  # cached by an earlier probe

    def _shape(self, num_rows: int) -> tuple[int, int]:
        """Sequences, and rows of each."""
        most = min(self._capacity.max_num_sequences, self._capacity.num_blocks // 2)
        num_sequences = max(1, min(most, num_rows // _ROWS_PER_SEQUENCE))
        num_sequences = 2 ** (num_sequences.bit_length() - 1)
        while num_rows % num_sequences:
            num_sequences //= 2
        return num_sequences, num_rows // num_sequences

    def _whole_blocks(self, num_tokens: int) -> int:
        """The cacheable part of a context."""
        return num_tokens // self._capacity.block_len * self._capacity.block_len

    def _hold(self, request: Request, context: tuple[int, ...], further: tuple[int, ...]) -> int:
        """Opens a request and computes its context. Returns the computed length, larger if more was cached."""
        return compute(self._target, request, (*context, *further), len(context))

    def _timed(self, requests: Sequence[Request], spans: Sequence[Span]) -> float:
        try:
            self._stopwatch.start()
            self._target.execute(spans)
            return self._stopwatch.stop()
        finally:
            for request in requests:
                self._target.release(request.id)


def _request(name: str) -> Request:
    return Request(f"probe-{name}", (0,), SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0)
