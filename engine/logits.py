"""Logits processing: edits of single values (``edit``), and thresholds below which no token may be chosen (``floors``).

The order is: penalties, logit bias, allowed tokens, the masks of min_tokens, of a grammar and of bad words, temperature,
top-k, top-p, min-p. The last three are floors on the tempered logits z. Equally probable tokens are kept or dropped
together, so the result depends on the logits alone and not on a sort order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.sampling_params import SamplingParams
from engine.device import to_device
from engine.gumbel_argmax import Peaks, largest, num_rows_at_once, relative

_NUM_LIKELY = 1024  # tokens that nearly always hold the mass of top-p


class TokenCounts:
    """The distinct tokens of a sequence, with how often each was generated. Append-only."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._token_ids = np.zeros(64, np.int64)
        self._num_generated = np.zeros(64, np.float32)

    def add(self, token_ids: Sequence[int], generated: bool) -> None:
        for token_id in token_ids:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._num_generated = np.concatenate([self._num_generated, np.zeros_like(self._num_generated)])
            self._token_ids[slot] = token_id
            self._num_generated[slot] += generated

    def with_drafts(
        self, draft_ids: Sequence[int], num_rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Tokens (K,), how often each was generated before each row (num_rows, K), and whether it occurred (num_rows, K).
        The last row follows all drafts, each earlier row one draft less."""
        num_known = len(self._slots)
        new_ids = list(dict.fromkeys(token_id for token_id in draft_ids if token_id not in self._slots))
        columns = {token_id: num_known + i for i, token_id in enumerate(new_ids)}
        num_generated = np.zeros((num_rows, num_known + len(new_ids)), np.float32)
        num_generated[:, :num_known] = self._num_generated[:num_known]
        first_row_len = len(draft_ids) + 1 - num_rows
        for i, token_id in enumerate(draft_ids):
            column = self._slots.get(token_id)
            num_generated[max(0, i + 1 - first_row_len) :, columns[token_id] if column is None else column] += 1
        occurred = num_generated > 0
        occurred[:, :num_known] = True
        return np.concatenate([self._token_ids[:num_known], np.array(new_ids, np.int64)]), num_generated, occurred


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of the rows of one span."""

    sampling: SamplingParams
    counts: TokenCounts | None  # None: no penalties
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None  # token ids and what is added to them
    draft_ids: tuple[int, ...]
    masked_ids: tuple[int, ...]  # may not be chosen ...
    num_masked_rows: int  # ... in the first so many rows
    allowed_ids: NDArray[np.int64] | None = None  # only these may be chosen; None: all
    bad: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # rows, and tokens that complete a bad word there
    masks: Tensor | None = None  # of a grammar, by row (`engine.grammar.vocabulary`)


def edit(x: Tensor, edits: Edits, first_id: int = 0) -> None:
    """Edits the rows of one span, x (num_rows, V) float32, in place. ``first_id``: the token of the first column, where x
    holds a part of the vocabulary."""
    sampling = edits.sampling

    def columns(token_ids: NDArray[np.int64], *values: NDArray[Any]) -> list[Tensor]:
        """The tokens' columns of x, and their parts of ``values`` (..., K)."""
        found = token_ids - first_id
        inside = (found >= 0) & (found < x.shape[1])
        return [to_device(array[..., inside], x.device) for array in (found, *values)]

    if edits.counts is not None:
        ids, num_generated, occurred = columns(*edits.counts.with_drafts(edits.draft_ids, len(x)))
        values = x[:, ids]
        repeated = torch.where(values < 0, values * sampling.repetition_penalty, values / sampling.repetition_penalty)
        values = torch.where(occurred, repeated, values)
        x[:, ids] = values - sampling.frequency_penalty * num_generated - sampling.presence_penalty * (num_generated > 0)
    if edits.bias is not None:
        ids, added = columns(*edits.bias)
        x[:, ids] += added
    if edits.allowed_ids is not None:
        (ids,) = columns(edits.allowed_ids)
        allowed = x[:, ids]
        x.fill_(-torch.inf)
        x[:, ids] = allowed
    if edits.num_masked_rows:
        x[: edits.num_masked_rows, columns(np.array(edits.masked_ids))[0]] = -torch.inf
    if edits.masks is not None:
        from xgrammar import apply_token_bitmask_inplace

        assert first_id == 0, "a request with a grammar is sampled over whole rows"
        apply_token_bitmask_inplace(x, edits.masks.to(x.device), vocab_size=x.shape[1])
    if edits.bad is not None:
        ids, rows = columns(edits.bad[1], edits.bad[0])
        before = x[rows, ids]
        x[rows, ids] = -torch.inf
        if edits.masks is not None:  # what the grammar demands comes before bad words
            is_stuck = torch.isneginf(x).all(-1)
            x[rows, ids] = torch.where(is_stuck[rows], before, -torch.inf)


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of R rows, each (R,) on the CPU. Neutral values: top_k >= V, top_p = 1, min_p = 0."""

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]


def floors(x: Tensor, at: Peaks, temperatures: Tensor, filters: Filters) -> Tensor:
    """The least z = (x - max x) / T that may be chosen in each row, (R,) float32; -inf where nothing is filtered."""
    floor = torch.full_like(at.rows, -torch.inf)
    has_top_k = filters.top_k < x.shape[-1]
    for rows, ks in _select(has_top_k, filters.top_k, x):
        kth = largest(x[rows], int(ks.max())).gather(1, ks[:, None] - 1)
        floor[rows] = relative(kth, at.rows[rows], temperatures[rows]).squeeze(1)
    for rows, masses in _select(filters.top_p < 1, filters.top_p, x):
        z = relative(x[rows], at.rows[rows], temperatures[rows])
        weights = z.exp()
        if has_top_k.any():
            weights *= z >= floor[rows, None]
        floor[rows] = _nucleus_floor(z, masses * weights.sum(-1))
    if filters.min_p.any():
        with np.errstate(divide="ignore"):  # log 0 = -inf admits all
            floor = torch.maximum(floor, to_device(np.log(filters.min_p).astype(np.float32), x.device))
    return floor


def _select(where: NDArray[np.bool_], limits: NDArray[Any], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows that a filter applies to, with their limits, in chunks that suit the device."""
    for rows in np.split(np.flatnonzero(where), range(num_rows_at_once(x), len(where), num_rows_at_once(x))):
        if len(rows):
            yield to_device(rows, x.device), to_device(limits[rows], x.device)


def _nucleus_floor(z: Tensor, wanted: Tensor) -> Tensor:
    """The least z of the smallest set of most probable tokens whose sum of exp(z) is at least ``wanted``, (R,). Sorts the
    _NUM_LIKELY largest first, and all tokens only in rows where those do not suffice."""
    floor = torch.empty_like(z[:, 0])
    open_rows = torch.arange(len(z), device=z.device)
    for num in (_NUM_LIKELY, z.shape[-1]):
        candidates = largest(z[open_rows], min(num, z.shape[-1]))
        weights = candidates.exp().double()
        mass_before = weights.cumsum(-1) - weights
        num_kept = (mass_before < wanted[open_rows, None]).sum(-1, keepdim=True).clamp_min(1)
        floor[open_rows] = candidates.gather(1, num_kept - 1).squeeze(1)
        open_rows = open_rows[num_kept.squeeze(1) == candidates.shape[-1]]
        if len(open_rows) == 0:
            break
    return floor
