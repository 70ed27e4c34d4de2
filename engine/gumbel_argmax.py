"""Gumbel-argmax over logits, evaluated for few blocks of the vocabulary.

A row of logits is read once, for the maximum of each block of 64 tokens. With noise, a block whose largest logit plus
largest noise (``engine.noise.block_max``) is below a score already seen cannot win and is skipped.

Shapes: logits x (R, V) of any floating type; block maxima (R, B), B = ceil(V / 64).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.noise import BLOCK_LEN, block_gumbel, block_max

_NUM_FIRST_BLOCKS = 8  # evaluated first; the winner is nearly always among them
_ROUNDING = 1e-4  # exceeds the float32 error of a bound
_CACHED_VALUES = 1 << 16  # float32 values: 256 KB
_MIN_TEMPERATURE = 1e-6  # below it, differences of float32 logits exceed any noise


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest logit of each block (R, B) and of each row (R,), float32. NaN propagates to both."""

    blocks: Tensor
    rows: Tensor


def peaks(x: Tensor) -> Peaks:
    num_full, tail_len = divmod(x.shape[-1], BLOCK_LEN)
    blocks = torch.unflatten(x[:, : num_full * BLOCK_LEN], -1, (num_full, BLOCK_LEN)).amax(-1)
    if tail_len:
        blocks = torch.cat([blocks, x[:, num_full * BLOCK_LEN :].amax(-1, keepdim=True)], dim=-1)
    blocks = blocks.float()
    return Peaks(blocks, blocks.amax(-1))


def greedy(x: Tensor, at: Peaks) -> Tensor:
    """The most probable token of each row, the lowest id of equal ones, (R,) int64."""
    block_ids = at.blocks.argmax(-1, keepdim=True)  # torch promises the first of equal ones
    token_ids, values = _look_into(x, block_ids)
    return token_ids.flatten(1).gather(1, values.flatten(1).argmax(-1, keepdim=True)).squeeze(1)


def relative(x: Tensor, highest: Tensor, temperatures: Tensor) -> Tensor:
    """z = (x - max x) / T, (R, ...) float32: at most 0, and monotone in x, so that thresholds on z are exact. ``highest``
    and ``temperatures`` are (R,)."""
    shape = (-1,) + (1,) * (x.dim() - 1)
    return (x.float() - highest.view(shape)) / temperatures.clamp_min(_MIN_TEMPERATURE).view(shape)


def largest(x: Tensor, num: int) -> Tensor:
    """The ``num`` largest values of each row in descending order, (R, num)."""
    if x.device.type != "cpu":
        return x.topk(num).values
    # NumPy selects and sorts with vector instructions: ten times as fast as torch for the largest thousand.
    selected = np.partition(x.float().numpy(), -num, axis=-1)[:, -num:]
    return torch.from_numpy(np.sort(selected, axis=-1)[:, ::-1].copy())


def gumbel_argmax(x: Tensor, at: Peaks, temperatures: Tensor, floors: Tensor, keys: Tensor) -> Tensor:
    """argmax over {v: z_v >= floor} of z_v + G(key, v), (R,) int64: samples of softmax(z) over these tokens. The sum is
    taken in float64, where it is exact. A row without a finite maximum yields V.

    Args:
        temperatures, floors: (R,) float32; a floor of -inf admits all tokens.
        keys: (R,) int64, of ``engine.noise.noise_keys``.
    """
    num_blocks = at.blocks.shape[-1]
    z_blocks = relative(at.blocks, at.rows, temperatures)
    noise = _on_device(block_max, keys[:, None], torch.arange(num_blocks, device=x.device))
    bounds = torch.where(z_blocks >= floors[:, None], z_blocks + noise + _ROUNDING, -torch.inf)
    num_first = min(_NUM_FIRST_BLOCKS + 1, num_blocks)
    highest, block_ids = bounds.topk(num_first)
    rows = torch.arange(len(x), device=x.device)

    def best_of(rows: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(r,) rows and (r, b) blocks of each: the best score and the token that has it, (r,)."""
        token_ids, values = _look_into(x, block_ids, rows)
        z = relative(values, at.rows[rows], temperatures[rows])
        gumbel = _on_device(block_gumbel, keys[rows, None], block_ids, torch.arange(BLOCK_LEN, device=x.device))
        scores = torch.where(z >= floors[rows, None, None], z.double() + gumbel.double(), -torch.inf).flatten(1)
        best = scores.amax(-1)
        wins = scores == best[:, None]
        return best, torch.where(wins, token_ids.flatten(1), x.shape[-1]).amin(-1)  # the lowest id of equal ones

    best, token_ids = best_of(rows, block_ids[:, :_NUM_FIRST_BLOCKS])
    if num_first <= _NUM_FIRST_BLOCKS:
        return token_ids
    open_rows = (highest[:, -1] >= best).nonzero().squeeze(1)
    if len(open_rows) == 0:
        return token_ids
    pair_rows, pair_blocks = (bounds[open_rows] >= best[open_rows, None]).nonzero(as_tuple=True)
    pair_best, pair_tokens = best_of(open_rows[pair_rows], pair_blocks[:, None])
    best = best.scatter_reduce(0, open_rows[pair_rows], pair_best, "amax")
    wins = pair_best == best[open_rows[pair_rows]]
    token_ids[open_rows] = x.shape[-1]
    return token_ids.scatter_reduce(0, open_rows[pair_rows[wins]], pair_tokens[wins], "amin")


def probabilities(x: Tensor, at: Peaks, temperatures: Tensor, floors: Tensor | None, token_ids: Tensor) -> Tensor:
    """Probability of one token per row under softmax(z) over {v: z_v >= floor}, (R,) float32. None admits all tokens."""
    parts = []
    for start in range(0, len(x), num_rows_at_once(x)):
        rows = slice(start, start + num_rows_at_once(x))
        z = relative(x[rows], at.rows[rows], temperatures[rows])
        own = z.gather(1, token_ids[rows, None].clamp_max(x.shape[-1] - 1)).squeeze(1).exp()
        weights = z.exp()
        if floors is not None:
            weights *= z >= floors[rows, None]
        parts.append(own / weights.sum(-1))
    return torch.cat(parts)


def num_rows_at_once(x: Tensor) -> int:
    """Rows per chunk. On a CPU, temporaries that exceed the caches cost more than the arithmetic."""
    return max(1, _CACHED_VALUES // x.shape[-1]) if x.device.type == "cpu" else len(x)


def _look_into(x: Tensor, block_ids: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Token ids and logits of blocks (r, b): both (r, b, 64). Past the end of the vocabulary the logit is -inf."""
    token_ids = block_ids[..., None] * BLOCK_LEN + torch.arange(BLOCK_LEN, device=x.device)
    inside = token_ids.clamp_max(x.shape[-1] - 1)
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    values = x[rows[:, None, None], inside]
    return token_ids, torch.where(token_ids == inside, values, -torch.inf)


def _on_device(noise: Callable[..., Any], *arrays: Tensor) -> Tensor:
    """Noise by NumPy on a CPU, which is two to three times as fast as torch there."""
    if arrays[0].device.type == "cpu":
        return torch.from_numpy(noise(*(array.numpy() for array in arrays)))
    return cast(Tensor, noise(*arrays))
