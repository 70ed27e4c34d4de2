"""The network of DSpark and DFlash in plain torch: the one that is trained, and the reference for the fast implementation.

Module names are those of the released checkpoints. A block occupies positions anchor .. anchor + gamma - 1: the anchor (the
last committed token) and masks. Position k (from 0) predicts the token at anchor + 1 + k. In every layer each position
attends to all positions of its block and to the context before the anchor, whose keys and values are projected from the
target's features (DSpark, equations 2 and 3). Blocks do not see one another. DFlash has no sequential head, and its anchor
predicts nothing: the block is one longer, and position k + 1 predicts the token at anchor + 1 + k.

    positions   0 ............ anchor - 1 | anchor   +1     +2   ...
    context     H_ctx  H_ctx  ...  H_ctx  | x_0     mask   mask      block of gamma rows
    predicts                              | x_1     x_2    x_3  ...
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.hidden_states.config import BlockConfig
from drafters.hidden_states.heads import MARKOV_HEADS, ConfidenceHead, MarkovHead
from drafters.hidden_states.modules import Attention, Mlp, Part, RmsNorm, Rotation, attend, output_rows, parts_of, rotation
from engine.models.config import DecoderConfig, inverse_frequencies


class BlockNetwork(nn.Module):
    """Embedding and head are frozen."""

    _frequencies: Tensor
    _rows: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size).requires_grad_(False)
        self.layers = nn.ModuleList(BlockLayer(shape, window, is_causal=causal) for window, causal in config.attention)
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
        """The parallel stage: h of every position that predicts in a block at each anchor, [A, block_len, d] after the
        final norm.

        Args:
            features: [rows, feature_size], of whole sequences of ``lens`` tokens; a last token's features are not read.
            token_ids: int64 [rows].
            anchors: int64 [A], rows, ascending.
            block_len: tokens to predict; None: all of a block.
        """
        context = self.hidden_norm(self.fc(features))
        starts = torch.tensor([0, *lens], device=anchors.device).cumsum(0)
        sequence = torch.searchsorted(starts, anchors, right=True) - 1
        context_positions = torch.arange(len(features), device=anchors.device) - starts[:-1].repeat_interleave(starts.diff())
        block_len = (block_len or self.config.draft_len) + self.config.num_skipped
        steps = torch.arange(block_len, device=anchors.device)
        block_positions = (anchors - starts[sequence])[:, None] + steps
        at = rotation(context_positions, self._frequencies), rotation(block_positions, self._frequencies)
        parts = parts_of(starts.tolist(), anchors.tolist())
        x = self.block_inputs(features, token_ids, anchors, anchors > starts[sequence], block_len)
        for layer in self.layers:
            x = layer(x, context, at, parts, anchors)
        return self.norm(x[:, self.config.num_skipped :])

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

    def __init__(self, config: BlockConfig) -> None:
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


def markov_rows(config: BlockConfig) -> Tensor:
    """The row of W_1 for each token of the target's vocabulary, int64 [vocab]."""
    known = torch.tensor(config.draft_token_ids, device="cpu") if config.has_outside_row else None
    return output_rows(known, config.shape.vocab_size, outside=config.num_outputs)


class BlockLayer(nn.Module):
    """``window``: of the context before the anchor; None: all of it. ``is_causal``: within the block."""

    def __init__(self, shape: DecoderConfig, window: int | None = None, *, is_causal: bool = False) -> None:
        super().__init__()
        self.window, self.is_causal = window, is_causal
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, at: tuple[Rotation, Rotation], parts: Sequence[Part], anchors: Tensor
    ) -> Tensor:
        """x [A, gamma, d], context [rows, d] -> [A, gamma, d]"""
        attention, normed = self.self_attn, self.input_layernorm(x)
        queries = attention.queries(normed, at[1])
        keys, values = attention.keys_values(context, at[0])
        block_keys, block_values = attention.keys_values(normed, at[1])
        attended = [
            attend(
                queries[own],
                (keys[rows], values[rows]),
                (block_keys[own], block_values[own]),
                anchors[own] - rows.start,
                self.window,
                is_causal=self.is_causal,
            )
            for rows, own in parts
        ]
        x = x + attention.o_proj(torch.cat(attended).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))
