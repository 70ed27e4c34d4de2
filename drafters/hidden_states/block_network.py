"""DSpark's network in plain torch: the network that is trained, and the reference for the fast implementation.

Module names are those of the released checkpoints. A block occupies positions anchor .. anchor + gamma - 1: the anchor (the
last committed token) and masks. Position k (from 0) predicts the token at anchor + 1 + k. In every layer each position
attends to all positions of its block and to the context before the anchor, whose keys and values are projected from the
target's features (equations 2 and 3). Blocks do not see one another.

    positions   0 ............ anchor - 1 | anchor   +1     +2   ...
    context     H_ctx  H_ctx  ...  H_ctx  | x_0     mask   mask      block of gamma rows
    predicts                              | x_1     x_2    x_3  ...
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.hidden_states.config import DSparkConfig
from drafters.hidden_states.heads import MARKOV_HEADS, ConfidenceHead, MarkovHead
from engine.models.config import DecoderConfig, inverse_frequencies


class DSparkNetwork(nn.Module):
    """Embedding and head are frozen."""

    _frequencies: Tensor
    _rows: Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size).requires_grad_(False)
        self.layers = nn.ModuleList(DSparkLayer(shape) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.fc = nn.Linear(config.feature_size, shape.hidden_size, bias=config.fc_bias)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, config.num_outputs, bias=False).requires_grad_(False)
        self.markov_head: MarkovHead | None = MARKOV_HEADS[config.markov_kind](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None
        self.anchor_input = AnchorInput(config) if config.anchor_input else None
        # Not in the state dict, and on the CPU even while parameters are on "meta".
        frequencies = torch.tensor(inverse_frequencies(shape), device="cpu")
        self.register_buffer("_frequencies", frequencies, persistent=False)
        self.register_buffer("_rows", markov_rows(config), persistent=False)

    def forward(
        self, features: Tensor, token_ids: Tensor, lens: Sequence[int], anchors: Tensor, block_len: int | None = None
    ) -> Tensor:
        """The parallel stage: h of every position of a block at each anchor, [A, block_len, d] after the final norm.

        Args:
            features: [rows, feature_size], of whole sequences of ``lens`` tokens; a last token's features are not read.
            token_ids: int64 [rows].
            anchors: int64 [A], rows, ascending.
            block_len: of the blocks; None: gamma.
        """
        context = self.hidden_norm(self.fc(features))
        starts = torch.tensor([0, *lens], device=anchors.device).cumsum(0)
        sequence = torch.searchsorted(starts, anchors, right=True) - 1
        context_positions = torch.arange(len(features), device=anchors.device) - starts[:-1].repeat_interleave(starts.diff())
        block_len = block_len or self.config.block_size
        steps = torch.arange(block_len, device=anchors.device)
        block_positions = (anchors - starts[sequence])[:, None] + steps
        at = _rotation(context_positions, self._frequencies), _rotation(block_positions, self._frequencies)
        parts = _parts(starts.tolist(), anchors.tolist())
        x = self.block_inputs(features, token_ids, anchors, anchors > starts[sequence], block_len)
        for layer in self.layers:
            x = layer(x, context, at, parts, anchors)
        return self.norm(x)

    def previous_embeddings(self, token_ids: Tensor) -> Tensor:
        """W_1 of tokens, [..., r]. Position k of a block takes the token at anchor + k."""
        assert self.markov_head is not None
        return self.markov_head.markov_w1(self._rows[token_ids])

    def latents(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Latents of the sequential head with teacher forcing, [A, gamma, r]; None without one. ``hidden`` [A, gamma, d];
        ``previous`` int64 [A, gamma], column k the token at anchor + k."""
        if self.markov_head is None:
            return None
        return self.markov_head.unroll(self.previous_embeddings(previous), hidden)

    def logits(self, hidden: Tensor, latents: Tensor | None) -> Tensor:
        """Equation 4: [..., num_outputs] from h [..., d] and latents [..., r]."""
        logits: Tensor = self.lm_head(hidden)
        return logits if latents is None or self.markov_head is None else logits + self.markov_head.markov_w2(latents)

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Equation 7 before the sigmoid: [A, gamma]. Arguments as of ``latents``."""
        assert self.confidence_head is not None
        return self.confidence_head(hidden, self.previous_embeddings(previous) if self.confidence_head.with_markov else None)

    def block_inputs(
        self, features: Tensor, token_ids: Tensor, anchors: Tensor, has_context: Tensor, block_len: int
    ) -> Tensor:
        """[A, block_len, d]. ``has_context``: whether a token stands before each anchor in its sequence, bool [A]."""
        mask = torch.full((len(anchors), block_len), self.config.mask_token_id, device=anchors.device)
        mask[:, 0] = token_ids[anchors]
        embedded = self.embed_tokens(mask).to(self.norm.weight.dtype)
        if self.anchor_input is None:
            return embedded
        last = features[(anchors - 1).clamp_min(0)] * has_context[:, None]
        return embedded + self.anchor_input(last, embedded[:, 0], block_len)


class AnchorInput(nn.Module):
    """Ours: adds to each position's input a linear map of [features at anchor - 1; the anchor's embedding]."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        num_in, hidden = config.feature_size + config.shape.hidden_size, config.shape.hidden_size
        rank = config.anchor_input_rank
        self.reduce = nn.Linear(num_in, rank, bias=False) if rank is not None else nn.Identity()
        self.maps = nn.Linear(rank or num_in, config.block_size * hidden)

    def forward(self, features: Tensor, anchors: Tensor, block_len: int) -> Tensor:
        """[A, feature_size] (zeros without context), [A, d] -> [A, block_len, d]"""
        x = self.reduce(torch.cat([features.to(anchors.dtype), anchors], dim=-1))
        num = block_len * anchors.shape[-1]
        return F.linear(x, self.maps.weight[:num], self.maps.bias[:num]).unflatten(-1, (block_len, -1))


def output_rows(token_ids: Tensor | None, vocab_size: int, outside: int) -> Tensor:
    """The row of a reduced head of ``token_ids`` (None: all) for each token, int64 [vocab_size]; ``outside``: for others."""
    if token_ids is None:
        return torch.arange(vocab_size, device="cpu")
    rows = torch.full((vocab_size,), outside, device="cpu")
    rows[token_ids] = torch.arange(len(token_ids), device="cpu")
    return rows


def markov_rows(config: DSparkConfig) -> Tensor:
    """The row of W_1 for each token of the target's vocabulary, int64 [vocab]."""
    known = None if config.draft_token_ids is None else torch.tensor(config.draft_token_ids, device="cpu")
    return output_rows(known, config.shape.vocab_size, outside=config.num_outputs)


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self._eps).to(x.dtype)


_Rotation = tuple[Tensor, Tensor]  # cosines and sines of positions, [..., 1, head_dim / 2]
_Part = tuple[slice, slice]  # rows of a sequence, and its anchors


def _rotation(positions: Tensor, frequencies: Tensor) -> _Rotation:
    angles = (positions[..., None].float() * frequencies)[..., None, :]
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, rotation: _Rotation) -> Tensor:
    """[..., heads, head_dim] at positions [...]"""
    cos, sin = rotation
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def _parts(starts: list[int], anchors: list[int]) -> list[_Part]:
    parts = []
    for start, end in pairwise(starts):
        first, last = bisect_left(anchors, start), bisect_left(anchors, end)
        if last > first:
            parts.append((slice(start, end), slice(first, last)))
    return parts


class _Attention(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_size, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.q_size, shape.hidden_size, bias=shape.out_bias)
        self.q_norm = RmsNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, context: Tensor, at: tuple[_Rotation, _Rotation], parts: Sequence[_Part], anchors: Tensor
    ) -> Tensor:
        """x [A, gamma, d], context [rows, d] -> [A, gamma, d]"""
        heads = (-1, self._shape.head_dim)
        queries = _rotate(self.q_norm(self.q_proj(x).unflatten(-1, heads)), at[1])
        (keys, values), (block_keys, block_values) = (
            (_rotate(self.k_norm(self.k_proj(y).unflatten(-1, heads)), rotation), self.v_proj(y).unflatten(-1, heads))
            for y, rotation in zip((context, x), at, strict=True)
        )
        attended = [
            _attend(queries[own], keys[rows], values[rows], block_keys[own], block_values[own], anchors[own] - rows.start)
            for rows, own in parts
        ]
        return self.o_proj(torch.cat(attended).flatten(-2))


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, block_keys: Tensor, block_values: Tensor, context_lens: Tensor
) -> Tensor:
    """Blocks of one sequence, [A, gamma, heads, head_dim]. Block a sees the first ``context_lens[a]`` context rows."""
    q = queries.unflatten(-2, (keys.shape[-2], -1)) * queries.shape[-1] ** -0.5
    before = torch.einsum("akhgd,thd->ahgkt", q, keys)
    hidden = torch.arange(len(keys), device=keys.device) >= context_lens[:, None]
    before = before.masked_fill(hidden[:, None, None, None], -torch.inf)
    within = torch.einsum("akhgd,ajhd->ahgkj", q, block_keys)
    weights = torch.cat([before, within], dim=-1).float().softmax(-1).to(values.dtype)
    of_context, of_block = weights.split([len(keys), within.shape[-1]], dim=-1)
    out = torch.einsum("ahgkt,thd->akhgd", of_context, values) + torch.einsum("ahgkj,ajhd->akhgd", of_block, block_values)
    return out.flatten(2, 3)


class _Mlp(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DSparkLayer(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, at: tuple[_Rotation, _Rotation], parts: Sequence[_Part], anchors: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, at, parts, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))
