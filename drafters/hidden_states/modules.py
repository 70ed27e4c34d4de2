"""Parts of the networks in plain torch that are trained, and that the served ones are tested against."""

from bisect import bisect_left
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import DecoderConfig


def output_rows(token_ids: Tensor | None, vocab_size: int, outside: int) -> Tensor:
    """The row of a reduced head of ``token_ids`` (None: all) for each token, int64 [vocab_size]; ``outside``: for others."""
    if token_ids is None:
        return torch.arange(vocab_size, device="cpu")
    rows = torch.full((vocab_size,), outside, device="cpu")
    rows[token_ids] = torch.arange(len(token_ids), device="cpu")
    return rows


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self._eps).to(x.dtype)


Rotation = tuple[Tensor, Tensor]  # cosines and sines of positions, [..., 1, head_dim / 2]
Part = tuple[slice, slice]  # rows of a sequence, and its anchors
KeyValues = tuple[Tensor, Tensor]  # rotated keys, and values: [..., kv_heads, head_dim]


def rotation(positions: Tensor, frequencies: Tensor) -> Rotation:
    angles = (positions[..., None].float() * frequencies)[..., None, :]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """[..., heads, head_dim] at positions [...]"""
    cos, sin = rotation
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def parts_of(starts: list[int], anchors: list[int]) -> list[Part]:
    parts = []
    for start, end in pairwise(starts):
        first, last = bisect_left(anchors, start), bisect_left(anchors, end)
        if last > first:
            parts.append((slice(start, end), slice(first, last)))
    return parts


def attend(
    queries: Tensor,
    context: KeyValues,
    block: KeyValues,
    context_lens: Tensor,
    window: int | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Blocks of one sequence, [A, gamma, heads, head_dim]. Block a sees itself, up to each position if ``is_causal``, and of
    the ``context`` the first ``context_lens[a]`` rows, of these the last ``window``."""
    (keys, values), (block_keys, block_values) = context, block
    q = queries.unflatten(-2, (keys.shape[-2], -1)) * queries.shape[-1] ** -0.5
    before = torch.einsum("akhgd,thd->ahgkt", q, keys)
    rows = torch.arange(len(keys), device=keys.device)
    hidden = rows >= context_lens[:, None]
    if window is not None:
        hidden |= rows < context_lens[:, None] - window
    before = before.masked_fill(hidden[:, None, None, None], -torch.inf)
    within = torch.einsum("akhgd,ajhd->ahgkj", q, block_keys)
    if is_causal:
        num_queries, num_keys = within.shape[-2:]
        later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=keys.device).triu(num_keys - num_queries + 1)
        within = within.masked_fill(later, -torch.inf)
    weights = torch.cat([before, within], dim=-1).float().softmax(-1).to(values.dtype)
    of_context, of_block = weights.split([len(keys), within.shape[-1]], dim=-1)
    out = torch.einsum("ahgkt,thd->akhgd", of_context, values) + torch.einsum("ahgkj,ajhd->akhgd", of_block, block_values)
    return out.flatten(2, 3)


class Attention(nn.Module):
    """Projections of a layer whose keys and values may come from other rows. ``num_in``: their input's size."""

    def __init__(self, shape: DecoderConfig, num_in: int | None = None) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        num_in = num_in or shape.hidden_size
        self.q_proj = nn.Linear(num_in, shape.q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(num_in, shape.kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(num_in, shape.kv_size, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.q_size, shape.hidden_size, bias=shape.out_bias)
        self.q_norm = RmsNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()

    def queries(self, x: Tensor, at: Rotation) -> Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), at)

    def keys_values(self, x: Tensor, at: Rotation) -> KeyValues:
        keys, values = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(keys), at), values


class Mlp(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
