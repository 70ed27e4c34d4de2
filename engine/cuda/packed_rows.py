"""What the sampling kernels read beside logits: the parameters and edits of each row, in one buffer of 64-bit words.

    0 ............................ R * len(Field) ............................ end
    | a record of each row         | lists: token ids, counts, biases, bit masks |

A record holds the offset of each of its lists from the start of the buffer. Rows of a span share lists.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.logits import Edits

if TYPE_CHECKING:
    from engine.sampling import SampleSpan


class Field(IntEnum):
    """The words of a record. Those named as float hold the bits of a float64."""

    KEY = 0
    TEMPERATURE = 1  # float
    TOP_K = 2  # the number of columns or more: no filter
    TOP_P = 3  # float; 1: no filter
    FLOOR = 4  # float: the least (z - max z) / T that may be chosen
    EDITED = 5  # number of the row among those that are edited; -1: it is not
    FILTERED = 6  # the same for top-k and top-p
    REPETITION = 7  # float
    FREQUENCY = 8  # float
    PRESENCE = 9  # float
    COUNTED = 10  # columns with penalties, then how often each was generated before the drafts; and their number
    NUM_COUNTED = 11
    NUM_KNOWN = 12  # of them, the first so many have occurred before the drafts
    DRAFTS = 13  # their columns; and how many come before this row
    NUM_DRAFTS = 14
    BIASED = 15  # columns, then what is added to each as float64; and their number
    NUM_BIASED = 16
    ALLOWED = 17  # columns; and their number, 0: all are allowed
    NUM_ALLOWED = 18
    MASKED = 19  # columns; and their number
    NUM_MASKED = 20
    BAD = 21  # as MASKED, but in a row with a grammar only while other tokens can be chosen
    NUM_BAD = 22
    GRAMMAR = 23  # a bit for each column, set where it is allowed; 0: no grammar


NUM_FIELDS = len(Field)
_NOWHERE = -1  # the column of a token that the logits do not hold


class PackedRows:
    """Records of ``num_rows`` rows; each starts as a greedy one without edits.

    Args:
        num_columns: of the logits.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._table = np.zeros((num_rows, NUM_FIELDS), np.int64)
        self._floats = self._table.view(np.float64)
        self._table[:, Field.TOP_K] = num_columns
        self._floats[:, Field.TOP_P] = 1.0
        self._floats[:, Field.FLOOR] = -np.inf
        self._table[:, [Field.EDITED, Field.FILTERED]] = -1
        self._lists: list[NDArray[np.int64]] = []
        self._len = self._table.size
        self.num_columns = num_columns
        self.num_edited = self.num_filtered = 0

    def __len__(self) -> int:
        return len(self._table)

    def buffer(self) -> NDArray[np.int64]:
        """[words]"""
        return np.concatenate([self._table.ravel(), *self._lists])

    def set_noise(self, keys: NDArray[np.int64], temperatures: NDArray[np.float32]) -> None:
        """Of all rows, [rows] each."""
        self._table[:, Field.KEY] = keys
        self._floats[:, Field.TEMPERATURE] = temperatures

    def set_floors(self, floors: NDArray[np.float32]) -> None:
        """Of all rows, [rows]."""
        self._floats[:, Field.FLOOR] = floors

    def add(self, member: "SampleSpan", columns: "Columns") -> None:
        """The filters and edits of a span's rows."""
        rows, sampling = member.rows, member.state.sampling
        if member.is_noisy and member.state.is_filtered:
            self._filter(rows, sampling.top_k, sampling.top_p, sampling.min_p)
        if member.edits is not None:
            self._table[rows, Field.EDITED] = self.num_edited + np.arange(member.num_rows)
            self.num_edited += member.num_rows
            self._edit(rows, member.edits, columns)

    def _filter(self, rows: slice, top_k: int | None, top_p: float, min_p: float) -> None:
        if min_p > 0.0:
            self._floats[rows, Field.FLOOR] = np.log(min_p).astype(np.float32)
        top_k = self.num_columns if top_k is None else min(top_k, self.num_columns)
        if top_k < self.num_columns or top_p < 1.0:
            num_rows = rows.stop - rows.start
            self._table[rows, Field.TOP_K] = top_k
            self._floats[rows, Field.TOP_P] = top_p
            self._table[rows, Field.FILTERED] = self.num_filtered + np.arange(num_rows)
            self.num_filtered += num_rows

    def _edit(self, rows: slice, edits: Edits, columns: "Columns") -> None:
        sampling, num_rows = edits.sampling, rows.stop - rows.start
        if edits.counts is not None:
            token_ids, num_generated, num_known = edits.counts.before_drafts(edits.draft_ids)
            self._set(rows, Field.COUNTED, columns(token_ids), num_generated.astype(np.int64))
            self._table[rows, Field.NUM_COUNTED] = len(token_ids)
            self._table[rows, Field.NUM_KNOWN] = num_known
            self._set(rows, Field.DRAFTS, columns(np.array(edits.draft_ids, np.int64)))
            self._table[rows, Field.NUM_DRAFTS] = len(edits.draft_ids) + 1 - num_rows + np.arange(num_rows)
            self._floats[rows, Field.REPETITION] = sampling.repetition_penalty
            self._floats[rows, Field.FREQUENCY] = sampling.frequency_penalty
            self._floats[rows, Field.PRESENCE] = sampling.presence_penalty
        if edits.bias is not None:
            token_ids, added = edits.bias
            self._set(rows, Field.BIASED, columns(token_ids), added.astype(np.float64).view(np.int64))
            self._table[rows, Field.NUM_BIASED] = len(token_ids)
        if edits.allowed_ids is not None:
            self._set(rows, Field.ALLOWED, columns(edits.allowed_ids))
            self._table[rows, Field.NUM_ALLOWED] = len(edits.allowed_ids)
        if edits.num_masked_rows:
            masked = slice(rows.start, rows.start + edits.num_masked_rows)
            self._set(masked, Field.MASKED, columns(np.array(edits.masked_ids, np.int64)))
            self._table[masked, Field.NUM_MASKED] = len(edits.masked_ids)
        if edits.bad is not None:
            bad_rows, token_ids = edits.bad
            at = columns(token_ids)
            for row in range(num_rows):
                own = at[bad_rows == row]
                self._set(slice(rows.start + row, rows.start + row + 1), Field.BAD, own)
                self._table[rows.start + row, Field.NUM_BAD] = len(own)
        if edits.masks is not None:
            words = edits.masks.numpy()
            even = np.zeros((num_rows, -(-words.shape[1] // 2) * 2), np.int32)
            even[:, : words.shape[1]] = words
            masks = even.view(np.int64)
            self._table[rows, Field.GRAMMAR] = self._put([masks.ravel()]) + np.arange(num_rows) * masks.shape[1]

    def _set(self, rows: slice, field: Field, *arrays: NDArray[np.int64]) -> None:
        self._table[rows, field] = self._put(arrays)

    def _put(self, arrays: Iterable[NDArray[np.int64]]) -> int:
        """Appends lists one behind the other; returns where the first begins."""
        start = self._len
        for array in arrays:
            self._lists.append(array)
            self._len += len(array)
        return start


class Columns:
    """Where the logits hold tokens. ``token_ids``: of the columns, ascending."""

    def __init__(self, token_ids: NDArray[np.int64]) -> None:
        self._token_ids = token_ids
        self._first = int(token_ids[0])
        self._is_range = int(token_ids[-1]) - self._first + 1 == len(token_ids)

    def __call__(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The column of each token; _NOWHERE where there is none."""
        if self._is_range:
            at: NDArray[Any] = token_ids - self._first
            return np.where((at >= 0) & (at < len(self._token_ids)), at, _NOWHERE)
        at = np.searchsorted(self._token_ids, token_ids)
        return np.where(self._token_ids[np.minimum(at, len(self._token_ids) - 1)] == token_ids, at, _NOWHERE)
