"""Tokens that a round with a combination of drafters brings beyond one with the best of its parts, for the same request.

A cascade is good where one of its members is: over recorded answers its tokens of a round are those of the best lookup for
the same request and a constant (correlation 0.98, slope 0.97; of the request's domain nothing is left to be explained). The
parts are scored, so this tells of each request what a combination would bring before it has drafted for it:

    prior = w (best + g) + (1 - w) max(best, all), within [1, 1 + max_draft_len]

- best: the longest of the parts' expected lengths for the request; w: the weight of the request's own rounds in it.
- g: mean gain over all requests, shrunk towards none.
- all: expected length with the combination by its own acceptance.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from router.drafter.matching import Floats, Ints
from router.estimates.decayed import DecayedSums

_PRIOR_DRAFTS = 8.0  # without a gain, before the first

GainSums = dict[str, tuple[Annotated[float, Field(ge=0)], float]]


class CombinationGains(DecayedSums[str]):
    """Sums by combination: weights of its drafts, and their tokens beyond those of the best part, weighted."""

    def __init__(self, memory: float) -> None:
        super().__init__(memory)
        self._expected: dict[str, Mapping[int, tuple[float, float]]] = {}  # by row of the request: best, w

    def clear_expected(self) -> None:
        """Drafts are compared with nothing until the next `prior`. To be called before drafts are observed of a request that
        reuses a row."""
        self._expected.clear()

    def prior(self, drafter: str, rows: Ints, best: Floats, weights: Floats, alone: Floats, max_draft_len: int) -> Floats:
        """Expected length by request; all arrays are (requests,). Drafts that follow are compared with ``best``."""
        pairs = zip(best.tolist(), weights.tolist(), strict=True)
        self._expected[drafter] = dict(zip(rows.tolist(), pairs, strict=True))
        num_drafts, num_more = self.get(drafter, 2)
        found: Floats = weights * (best + num_more / (num_drafts + _PRIOR_DRAFTS))
        found += (1.0 - weights) * np.maximum(best, alone)
        return np.clip(found, 1.0, 1.0 + max_draft_len)

    def observe(self, drafters: Sequence[str], rows: Ints, num_drafts: Floats, num_right: Floats) -> None:
        counts = zip(drafters, rows.tolist(), num_drafts.tolist(), num_right.tolist(), strict=True)
        for drafter, row, num, right in counts:
            best, weight = self._expected.get(drafter, {}).get(row, (0.0, 0.0))
            if weight:
                self.add(drafter, (weight * num, weight * (num + right - num * best)), num)
