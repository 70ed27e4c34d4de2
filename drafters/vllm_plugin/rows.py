"""Which request each row of vLLM's batch belongs to: rows carry no request ids, and move when requests end."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.sampling_params import SamplingParams
from drafters.protocol import Drafter

_LIKELIEST = SamplingParams(1, temperature=0.0)  # is drafted, since vLLM tells neither parameters nor seeds


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the batch. ``token_ids``: prompt and output; the last ``num_new`` were committed by the pass just done."""

    index: int
    token_ids: NDArray[np.int32]
    num_new: int

    @property
    def known(self) -> NDArray[np.int32]:
        """Its tokens before the pass."""
        return self.token_ids[: len(self.token_ids) - self.num_new]


class _RowSession:
    """A request as the drafter follows it, and where its row was last."""

    def __init__(self, request_id: str, row: Row) -> None:
        self.request_id = request_id
        self.index = row.index
        self._buffer: NDArray[np.int32] = np.empty(2 * len(row.token_ids), np.int32)
        self.num_tokens = 0
        self._append(row.token_ids)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self._buffer[: self.num_tokens]

    def precedes(self, row: Row) -> bool:
        return self.num_tokens == len(row.token_ids) - row.num_new and bool(np.array_equal(self.token_ids, row.known))

    def advance(self, row: Row) -> None:
        self.index = row.index
        self._append(row.token_ids[self.num_tokens :])

    def _append(self, token_ids: NDArray[Any]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self.token_ids, np.empty(end, np.int32)))
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end


class RowSessions:
    """The drafter's sessions, one for each row that has sampled a token; no others are kept.

    A row continues the session whose tokens are exactly those that it had before the pass. If there is none, one is opened:
    after its prompt, after a preemption that took its row, or after passes of which the proposer was not told. Rows with
    equal tokens are interchangeable. A request whose row is gone has ended, or was preempted.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._sessions: dict[int, _RowSession] = {}  # by index of the row
        self._numbers = count()

    def follow(self, rows: Sequence[Row]) -> bool:
        """Extends, opens and ends sessions by the rows of the batch. Returns whether nothing but decoding happened: each row
        was followed before, and each has a new token."""
        matched = dict(self._match(rows))
        kept = {session.request_id for session in matched.values()}
        for former in self._sessions.values():  # in the order of rows, which decides what the drafter remembers
            if former.request_id not in kept:
                self._drafter.release(former.request_id)
        self._sessions = {}
        for row in rows:
            session = matched.get(row.index)
            if session is not None:
                if row.num_new:
                    self._drafter.extend(session.request_id, row.token_ids[-row.num_new :].tolist())
                    session.advance(row)
                session.index = row.index
                self._sessions[row.index] = session
            elif row.num_new:
                self._sessions[row.index] = self._opened(row)
        return len(matched) == len(rows) and all(row.num_new for row in rows)

    def request_id(self, row: Row) -> str:
        """Of a row with a new token."""
        return self._sessions[row.index].request_id

    def check_integrity(self) -> None:
        self._drafter.check_integrity()
        for index, session in self._sessions.items():
            assert session.index == index, f"the session at row {index} notes row {session.index}"
        names = {session.request_id for session in self._sessions.values()}
        assert len(names) == len(self._sessions), "a session has two rows"

    def _match(self, rows: Sequence[Row]) -> Iterator[tuple[int, _RowSession]]:
        """(Index of a row, its session): first of rows that stayed, then of those that moved."""
        left = dict(self._sessions)
        moved = []
        for row in rows:
            session = left.get(row.index)
            if session is not None and session.precedes(row):
                yield row.index, left.pop(row.index)
            else:
                moved.append(row)
        by_len: defaultdict[int, list[_RowSession]] = defaultdict(list)
        for session in left.values():
            by_len[session.num_tokens].append(session)
        for row in moved if left else ():
            candidates = by_len[len(row.known)]
            session = next((one for one in candidates if one.precedes(row)), None)
            if session is not None:
                candidates.remove(session)
                yield row.index, session

    def _opened(self, row: Row) -> _RowSession:
        session = _RowSession(str(next(self._numbers)), row)
        self._drafter.open(session.request_id, row.token_ids.tolist(), len(row.known), _LIKELIEST)
        return session
