"""The rows of a pass that early exit looks at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.sampling import SampleSpan, SamplingState, keys_of, temperatures_of
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
    found: list[tuple[int, int, int, int]] = []
    members: list[SampleSpan] = []
    for number, (span, end) in enumerate(zip(spans, ends, strict=True)):
        num = min(span.num_drafts, MAX_DRAFTS)
        if not num or span.request_id in unchecked or not states[span.request_id].is_plain:
            continue
        first, drafts = end - span.num_drafts - 1, span.drafts[:num]
        found += [(first + i, number, i, token_id) for i, token_id in enumerate(drafts)]
        members.append(SampleSpan(states[span.request_id], drafts[:-1], num))
    at, span_of, index, token_ids = np.array(found, np.int64).reshape(-1, 4).T
    if not members:
        return WatchedRows(at, span_of, index, token_ids, np.zeros(0, np.int64), np.zeros(0, np.float32))
    return WatchedRows(at, span_of, index, token_ids, keys_of(members), temperatures_of(members))
