"""Acceptance of each live request with each drafter, in arrays over all requests."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.assignment import RequestView
from router.drafter.matching import NOWHERE, Floats, Ints
from router.estimates.decayed import GENERATION_SLOTS, retained
from router.estimates.pool_acceptance import NUM_POSITIONS

KNOWN_ROUNDS = 16.0  # of a request with a drafter, twice the prior's: then it explores no more
MEMORY_ROUNDS = 100.0  # a request's text changes as it goes on
_GROWTH = 256


class RequestAcceptance:
    """A row per live request, kept while it is shown and for one to two generations of slots after."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._rows: dict[str, int] = {}
        self._slot = 0
        self._shape = (_GROWTH, 1)
        self._free = list(range(_GROWTH))
        self._counts = np.zeros((2, *self._shape, NUM_POSITIONS))  # reached, right
        self._noise = np.zeros(self._shape)
        self._seen_slot = np.zeros(_GROWTH, np.int64)
        self._placed = np.zeros(_GROWTH, np.bool_)

    def next_slot(self) -> None:
        self._slot += 1
        if self._slot % GENERATION_SLOTS == 0:
            last = self._seen_slot.tolist()
            for request_id in [r for r, row in self._rows.items() if last[row] <= self._slot - GENERATION_SLOTS]:
                self._free.append(self._rows.pop(request_id))

    def clear(self) -> None:
        self._free.extend(self._rows.values())
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def follow(self, requests: Sequence[RequestView]) -> Ints:
        """Rows of requests; new ones get a row."""
        known = self._rows
        newcomers = [request for request in requests if request.request_id not in known]
        while len(self._free) < len(newcomers):
            self._resize(self._shape[0] + max(_GROWTH, self._shape[0]), self._shape[1])
        for request in newcomers:
            row = known[request.request_id] = self._free.pop()
            self._counts[:, row] = 0.0
            # What stands for requests to come decides for many: it is not left to chance.
            self._noise[row] = self._random.gumbel(size=self._shape[1]) if request.committed_len else 0.0
            self._placed[row] = False
        rows = np.array([known[request.request_id] for request in requests])
        self._seen_slot[rows] = self._slot
        return rows

    def rows_of(self, request_ids: Sequence[str]) -> Ints:
        """NOWHERE for unknown requests."""
        rows = self._rows
        return np.array([rows.get(request_id, NOWHERE) for request_id in request_ids], np.int64)

    def place(self, rows: Ints) -> NDArray[np.bool_]:
        """Marks requests as placed; returns whether they were before. A first place is the default, not a choice."""
        before = self._placed[rows]
        self._placed[rows] = True
        return before

    def add(self, rows: Ints, drafters: Ints, reached: Floats, right: Floats) -> None:
        """Adds drafts and scores: ``rows`` may be NOWHERE; ``drafters`` are columns; counts are by position."""
        self._widen(int(drafters.max()) + 1)
        shown = rows != NOWHERE
        pairs, inverse = np.unique(rows[shown] * self._shape[1] + drafters[shown], return_inverse=True)
        at = (inverse[:, None] * NUM_POSITIONS + np.arange(NUM_POSITIONS)).ravel()
        size = len(pairs) * NUM_POSITIONS
        new = np.stack([np.bincount(at, one[shown].ravel(), size).astype(np.float64) for one in (reached, right)])
        new = new.reshape(2, -1, NUM_POSITIONS)
        row, column = np.divmod(pairs, self._shape[1])
        self._counts[:, row, column] = self._counts[:, row, column] * retained(new[0, :, :1], MEMORY_ROUNDS) + new

    def noise(self, rows: Ints, columns: Ints) -> Floats:
        """(requests, drafters) Gumbel draws, fixed for the life of a request."""
        self._widen(int(columns.max()) + 1)
        return self._noise[rows[:, None], columns]

    def draw_explorers(
        self, live: NDArray[np.bool_], num_rounds: Floats, num_drafts: Floats, exploration: float
    ) -> tuple[Ints, Ints]:
        """Requests that explore, and their drafters: the least observed one, if it has hardly more rounds than the prior; of
        several that with the fewest ``num_drafts`` over all requests. Only ``live`` ones explore: many requests would follow
        a placeholder."""
        least = (num_rounds + num_drafts / (1.0 + num_drafts.max())).argmin(axis=1)
        unknown = (num_rounds.min(axis=1) < KNOWN_ROUNDS) & live
        tries = np.flatnonzero(unknown & (self._random.random(len(num_rounds)) < exploration))
        return tries, least[tries]

    def expected_lens(
        self, rows: Ints, columns: Ints, prior: Floats, strength: float, draft_lens: Sequence[int]
    ) -> tuple[Floats, Floats]:
        """Tokens of a round, bonus token included, and the rounds behind this; both (requests, drafters). ``prior``: of
        `PoolAcceptance.means`; it counts as ``strength`` rounds."""
        self._widen(int(columns.max()) + 1)
        reached, right = self._counts[:, rows[:, None], columns]
        reached = reached + strength
        rates = (right + strength * prior[columns]) / reached
        survival = np.cumprod(rates, axis=2, out=rates)
        lens = 1.0 + survival @ np.ones(NUM_POSITIONS)
        for j, draft_len in enumerate(draft_lens):
            if draft_len < NUM_POSITIONS:
                lens[:, j] = 1.0 + survival[:, j, :draft_len].sum(axis=1)
            elif draft_len > NUM_POSITIONS:  # those behind share the rate of the last
                last, before = survival[:, j, -1], np.maximum(survival[:, j, -2], 1e-12)
                rate = np.minimum(last / before, 1.0 - 1e-9)
                lens[:, j] += last * rate * (1.0 - rate ** (draft_len - NUM_POSITIONS)) / (1.0 - rate)
        return lens, reached[:, :, 0]

    def _widen(self, num_columns: int) -> None:
        if num_columns > self._shape[1]:
            self._resize(self._shape[0], num_columns)

    def _resize(self, num_rows: int, num_columns: int) -> None:
        """Grows the arrays; keeps their contents."""
        old_rows, old_columns = self._shape
        more_rows, more_columns = num_rows - old_rows, num_columns - old_columns
        self._counts = np.pad(self._counts, ((0, 0), (0, more_rows), (0, more_columns), (0, 0)))
        self._noise = np.pad(self._noise, ((0, more_rows), (0, more_columns)))
        self._noise[:old_rows, old_columns:] = self._random.gumbel(size=(old_rows, more_columns))
        self._seen_slot, self._placed = np.pad(self._seen_slot, (0, more_rows)), np.pad(self._placed, (0, more_rows))
        self._free.extend(range(num_rows - 1, old_rows - 1, -1))
        self._shape = (num_rows, num_columns)
