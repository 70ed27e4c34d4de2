"""Logits processing: edits of single values (``edit``), and thresholds below which no token may be chosen (``floors``).

The order is: penalties, logit bias, allowed tokens, the masks of min_tokens, of a grammar and of bad words, temperature,
top-k, top-p, min-p. The last three are floors on the tempered logits z. Equally probable tokens are kept or dropped
together, so the result depends on the logits alone and not on a sort order. Probability masses are sums of integers
(``weights``), so neither does it depend on the order of a sum, and every device keeps the same tokens.
"""

from collections import defaultdict
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

ONE_BITS = 34  # the weight of the most probable token is 2 ** 34: sums of 2 ** 19 tokens are exact in a float64
LOG2_E = 1.44269502162933349609375  # fp32, as are the next
LEAST_Z = -60.0  # the weight of anything below is 0
# 2 ** f = 1 + c1 f + ... + c5 f ** 5 for 0 <= f < 1 with a relative error of at most 1e-7: a minimax fit
EXP2 = (0.6931512951850891, 0.24016444385051727, 0.05579991266131401, 0.009017029777169228, 0.0018671301659196615)


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

    def before_drafts(self, draft_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
        """Tokens (K,), those of drafts included, how often each was generated before them (K,), and how many of the tokens
        have occurred before them; these come first."""
        new_ids = list(dict.fromkeys(token_id for token_id in draft_ids if token_id not in self._slots))
        num_known = len(self._slots)
        token_ids = np.concatenate([self._token_ids[:num_known], np.array(new_ids, np.int64)])
        num_generated = np.zeros(len(token_ids), np.float32)
        num_generated[:num_known] = self._num_generated[:num_known]
        return token_ids, num_generated, num_known

    def with_drafts(
        self, draft_ids: Sequence[int], num_rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Tokens (K,), how often each was generated before each row (num_rows, K), and whether it occurred (num_rows, K).
        The last row follows all drafts, each earlier row one draft less."""
        token_ids, before, num_known = self.before_drafts(draft_ids)
        columns = {token_id: num_known + i for i, token_id in enumerate(token_ids[num_known:].tolist())}
        num_generated = np.tile(before, (num_rows, 1))
        first_row_len = len(draft_ids) + 1 - num_rows
        for i, token_id in enumerate(draft_ids):
            column = self._slots.get(token_id)
            num_generated[max(0, i + 1 - first_row_len) :, columns[token_id] if column is None else column] += 1
        occurred = num_generated > 0
        occurred[:, :num_known] = True
        return token_ids, num_generated, occurred


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


def edit(x: Tensor, edits: Edits) -> None:
    """Edits the rows of one span, x (num_rows, V) float32, in place."""
    sampling = edits.sampling

    def columns(token_ids: NDArray[np.int64], *values: NDArray[Any]) -> list[Tensor]:
        """The tokens' columns of x, and their parts of ``values`` (..., K)."""
        inside = token_ids < x.shape[1]
        return [to_device(array[..., inside], x.device) for array in (token_ids, *values)]

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
        if x.device.type == "cpu":
            from xgrammar import apply_token_bitmask_inplace

            apply_token_bitmask_inplace(x, edits.masks, vocab_size=x.shape[1])
        else:  # xgrammar's kernel would be compiled in the middle of a request
            x.masked_fill_(~allowed_by(edits.masks.to(x.device), x.shape[1]), -torch.inf)
    if edits.bad is not None:
        ids, rows = columns(edits.bad[1], edits.bad[0])
        before = x[rows, ids]
        x[rows, ids] = -torch.inf
        if edits.masks is not None:  # what the grammar demands comes before bad words
            is_stuck = torch.isneginf(x).all(-1)
            x[rows, ids] = torch.where(is_stuck[rows], before, -torch.inf)


def allowed_by(masks: Tensor, vocab_size: int) -> Tensor:
    """Bool (R, vocab_size) of a grammar's masks, int32 (R, words) with a bit per token."""
    return ((masks[..., None] >> torch.arange(32, device=masks.device)) & 1).flatten(1)[:, :vocab_size].bool()


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of R rows, each (R,) on the CPU. Neutral values: top_k >= V, top_p = 1, min_p = 0."""

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams], num_rows: Sequence[int]) -> "Filters":
        """Of rows that follow each other, ``num_rows`` with the same parameters."""
        top_k = np.array([sampling.top_k or 2**31 for sampling in samplings], np.int64)
        masses = np.array([(sampling.top_p, sampling.min_p) for sampling in samplings], np.float64).reshape(-1, 2)
        return cls(*(np.repeat(column, num_rows) for column in (top_k, *masses.T)))


def floors(x: Tensor, at: Peaks, temperatures: Tensor, filters: Filters) -> Tensor:
    """The least z = (x - max x) / T that may be chosen in each row, (R,) float32; -inf where nothing is filtered."""
    floor = torch.full_like(at.rows, -torch.inf)
    has_top_k = filters.top_k < x.shape[-1]
    for rows, ks in _select(has_top_k, filters.top_k, x):
        kth = largest(x[rows], int(ks.max())).gather(1, ks[:, None] - 1)
        floor[rows] = relative(kth, at.rows[rows], temperatures[rows]).squeeze(1)
    for rows, masses in _select(filters.top_p < 1, filters.top_p, x):
        z = relative(x[rows], at.rows[rows], temperatures[rows])
        mass = weights(z)
        if has_top_k.any():
            mass *= z >= floor[rows, None]
        floor[rows] = _nucleus_floor(z, masses * mass.sum(-1, dtype=torch.float64))
    if filters.min_p.any():
        with np.errstate(divide="ignore"):  # log 0 = -inf admits all
            floor = torch.maximum(floor, to_device(np.log(filters.min_p).astype(np.float32), x.device))
    return floor


def _select(where: NDArray[np.bool_], limits: NDArray[Any], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows that a filter applies to, with their limits, in chunks that suit the device."""
    for rows in np.split(np.flatnonzero(where), range(num_rows_at_once(x), len(where), num_rows_at_once(x))):
        if len(rows):
            yield to_device(rows, x.device), to_device(limits[rows], x.device)


def weights(z: Tensor) -> Tensor:
    """exp(z) in units of 2 ** -ONE_BITS, rounded down, for z <= 0: whole numbers in fp32.

    By operations that every device rounds alike, none of them fused. The relative error of a usual fp32 exponential is some
    1e-7, this one's 2e-6 at most for z > -30: by so much top_p may be off.
    """
    t = z.clamp_min(LEAST_Z).mul_(LOG2_E)
    whole = t.floor()
    f = t.sub_(whole)
    p = f * EXP2[-1]
    for coefficient in EXP2[-2::-1]:
        p.add_(coefficient).mul_(f)
    exponents = whole.add_(ONE_BITS).mul_(2.0**23).int()
    return exponents.add_(p.add_(1.0).view(torch.int32)).view(torch.float32).floor_()


def _nucleus_floor(z: Tensor, wanted: Tensor) -> Tensor:
    """The least z of the smallest set of most probable tokens whose weight is at least ``wanted``, (R,) float64. Sorts the
    _NUM_LIKELY largest first, and all tokens only in rows where those do not suffice."""
    floor = torch.empty_like(z[:, 0])
    open_rows = torch.arange(len(z), device=z.device)
    for num in (_NUM_LIKELY, z.shape[-1]):
        candidates = largest(z[open_rows], min(num, z.shape[-1]))
        own = weights(candidates).double()
        mass_before = own.cumsum(-1) - own
        num_kept = (mass_before < wanted[open_rows, None]).sum(-1, keepdim=True).clamp_min(1)
        floor[open_rows] = candidates.gather(1, num_kept - 1).squeeze(1)
        open_rows = open_rows[num_kept.squeeze(1) == candidates.shape[-1]]
        if len(open_rows) == 0:
            break
    return floor


class BadWords:
    """Which tokens would complete a bad word, a sequence that an output must not hold, after the output so far.
    ``generated``: the output at first."""

    def __init__(self, words: Sequence[tuple[int, ...]], generated: Sequence[int]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._longer: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._longer[word[-2]].append(word)
        self._num_needed = max(map(len, words)) - 1  # of the output's end
        self._end: tuple[int, ...] = ()
        self.extend(generated)

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens = (*self._end, *token_ids)
        self._end = tokens[max(0, len(tokens) - self._num_needed) :]

    def completing(self, drafts: Sequence[int], num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows (K,) and the tokens (K,) that may not be chosen there. The last row follows all drafts, each earlier row one
        draft less."""
        tokens = (*self._end, *drafts)
        found = []
        for row in range(num_rows):
            end = len(tokens) - num_rows + 1 + row
            found += [(row, token_id) for token_id in self._always]
            for word in self._longer.get(tokens[end - 1], ()) if end else ():
                if tokens[max(0, end + 1 - len(word)) : end] == word[:-1]:
                    found.append((row, word[-1]))
        rows, token_ids = np.array(found, np.int64).reshape(-1, 2).T
        return rows, token_ids
