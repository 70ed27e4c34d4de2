"""The rows of a pass that early exit looks at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.noise import noise_keys
from engine.sampling import SamplingState
from router.plan import Span

MAX_DRAFTS = 16  # of a span; later drafts are not checked


@dataclass(slots=True)
class WatchedRows:
    """The rows that a draft token follows, in the order of the pass: row ``at`` to draft ``index`` of span ``span``."""

    at: NDArray[np.int64]
    span: NDArray[np.int64]
    index: NDArray[np.int64]
    drafts: NDArray[np.int64]
    keys: NDArray[np.int64]
    temperatures: NDArray[np.float32]

    def select(self, chosen: NDArray[np.bool_]) -> "WatchedRows":
        places = self.at[chosen], self.span[chosen], self.index[chosen]
        return WatchedRows(*places, self.drafts[chosen], self.keys[chosen], self.temperatures[chosen])


def watched_rows(
    spans: Sequence[Span], states: Mapping[str, SamplingState], unchecked: frozenset[str] = frozenset()
) -> WatchedRows:
    """Rows of requests whose next token depends on logits, temperature and seed only; others are never estimated. Without
    the requests ``unchecked``."""
    ends = accumulate([len(span.token_ids) for span in spans])
    at: list[int] = []
    span_of: list[int] = []
    index: list[int] = []
    drafts: list[int] = []
    positions: list[int] = []
    seeds, temperatures = [], []
    for number, (span, end) in enumerate(zip(spans, ends, strict=True)):
        num = min(span.num_drafts, MAX_DRAFTS)
        if not num or span.request_id in unchecked or not states[span.request_id].is_plain:
            continue
        state, first = states[span.request_id], end - span.num_drafts - 1
        at.extend(range(first, first + num))
        span_of.extend([number] * num)
        index.extend(range(num))
        drafts.extend(span.drafts[:num])
        seeds.extend([state.sampling.seed] * num)
        positions.extend(range(len(state), len(state) + num))
        temperatures.extend([state.sampling.temperature] * num)
    keys = noise_keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    places = [np.array(each, np.int64) for each in (at, span_of, index, drafts)]
    return WatchedRows(places[0], places[1], places[2], places[3], keys, np.array(temperatures, np.float32))
