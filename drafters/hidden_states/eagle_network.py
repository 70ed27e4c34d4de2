"""The network of EAGLE-3 and P-EAGLE in plain torch: the one that is trained, and the reference for the fast implementation.

Row r pairs the target's features at position r with the embedding of the token at r + 1, and predicts the token at r + 2. A
draft begins at row anchor - 1, whose token is the anchor, the last committed one. Its next rows take the token before each
and, in place of features, the state of the row before (EAGLE-3) or a mask's token and features (P-EAGLE).

    row         0      ...  anchor - 1 | anchor    + 1     ...
    features    f_0    ...  f_anchor-1 | h         h       of the row before
    token       x_1    ...  x_anchor   | draft 1   draft 2 ...
    predicts    x_2    ...  draft 1    | draft 2   draft 3 ...
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from drafters.hidden_states.config import EagleConfig
from drafters.hidden_states.modules import Attention, KeyValues, Mlp, RmsNorm, Rotation, attend, rotation
from engine.models.config import DecoderConfig, inverse_frequencies


class EagleNetwork(nn.Module):
    """Embedding and head are frozen."""

    _frequencies: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        shape, num_in = config.shape, config.feature_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size).requires_grad_(False)
        self.fc = nn.Linear(num_in, shape.hidden_size, bias=False)
        self.input_norm = RmsNorm(num_in, shape.norm_eps) if config.norm_before_fc else None
        sizes = [config.target_hidden_size] * len(config.target_layer_ids) if config.fc_norm else []
        self.fc_norm = nn.ModuleList(RmsNorm(size, shape.norm_eps) for size in sizes)
        self.layers = nn.ModuleList(
            EagleLayer(shape, window, is_first=i == 0, norm_before_residual=config.norm_before_residual)
            for i, window in enumerate(config.layer_windows)
        )
        self.norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, config.num_outputs, bias=False).requires_grad_(False)
        self.mask_hidden = None if config.mask_token_id is None else nn.Parameter(torch.zeros(1, 1, num_in))
        frequencies = torch.tensor(inverse_frequencies(shape), device="cpu")
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def combine(self, features: Tensor) -> Tensor:
        """[..., feature_size] -> [..., d], the place of a state."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if len(self.fc_norm):
            parts = zip(self.fc_norm, features.chunk(len(self.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(features)

    def forward(self, features: Tensor, token_ids: Tensor, lens: Sequence[int], anchors: Tensor, draft_len: int) -> Tensor:
        """States of ``draft_len`` rows from each anchor on, [A, draft_len, d] after the final norm, with the actual tokens
        (teacher forcing).

        Args:
            features: [rows, feature_size], of whole sequences of ``lens`` tokens.
            token_ids: int64 [rows]. Behind the end of a sequence any token is taken.
            anchors: int64 [A], rows, ascending; not the first of a sequence.
        """
        starts = torch.tensor([0, *lens], device=anchors.device).cumsum(0)
        sequence = torch.searchsorted(starts, anchors, right=True) - 1
        positions = torch.arange(len(features), device=anchors.device) - starts[:-1].repeat_interleave(starts.diff())
        combined = self.combine(features)
        embedded = self.embed_tokens(token_ids).to(combined.dtype)
        found = []
        for i, (start, end) in enumerate(pairwise(starts.tolist())):
            own = anchors[sequence == i]
            if len(own):
                rows = slice(start, end)
                found.append(self._sequence(combined[rows], embedded[rows], positions[rows], own - start, draft_len))
        return torch.cat(found)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def _sequence(self, combined: Tensor, embedded: Tensor, positions: Tensor, anchors: Tensor, draft_len: int) -> Tensor:
        """Of one sequence: [n, d] each, anchors [A] -> [A, draft_len, d]"""
        last, rows = len(combined) - 1, anchors - 1
        at = rotation(positions[:, None], self._frequencies)
        tokens, states = torch.cat([embedded[1:], embedded[-1:]])[:, None], combined[:, None]
        contexts: list[KeyValues] = []
        for layer in self.layers:
            states, own = layer(tokens, states, at, None, (), positions + 1)
            contexts.append((own[0][:, 0], own[1][:, 0]))
        if self.mask_hidden is not None:
            return self._parallel(tokens[rows, 0], combined[rows], contexts, rows, draft_len)
        state = states[rows]
        found = [self.norm(state)]
        drafted: list[list[KeyValues]] = [[] for _ in self.layers]
        for k in range(1, draft_len):
            state = found[-1] if self.config.norm_output else state
            at = rotation((rows + k)[:, None], self._frequencies)
            for layer, context, before in zip(self.layers, contexts, drafted, strict=True):
                state, own = layer(embedded[(anchors + k).clamp_max(last)][:, None], state, at, context, before, rows + 1)
                before.append(own)
            found.append(self.norm(state))
        return torch.cat(found, dim=1)

    def _parallel(
        self, tokens: Tensor, combined: Tensor, contexts: Sequence[KeyValues], rows: Tensor, draft_len: int
    ) -> Tensor:
        """P-EAGLE: the row of each anchor and masks behind it, in one pass."""
        mask_token, mask_state = self.mask_inputs()
        states, embedded = (part.expand(len(rows), draft_len, -1).clone() for part in (mask_state, mask_token))
        states[:, 0], embedded[:, 0] = combined, tokens
        at = rotation(rows[:, None] + torch.arange(draft_len, device=rows.device), self._frequencies)
        for layer, context in zip(self.layers, contexts, strict=True):
            states, _ = layer(embedded, states, at, context, (), rows)
        return self.norm(states)

    def mask_inputs(self) -> tuple[Tensor, Tensor]:
        """Embedding and combined features of a mask of P-EAGLE, [d] each."""
        assert self.mask_hidden is not None
        assert self.config.mask_token_id is not None
        state = self.combine(self.mask_hidden[0, 0])
        return self.embed_tokens.weight[self.config.mask_token_id].to(state.dtype), state


class EagleLayer(nn.Module):
    """A decoder layer; the first reads the embedding beside the state, each under a norm of its own."""

    def __init__(
        self, shape: DecoderConfig, window: int | None, *, is_first: bool, norm_before_residual: bool = False
    ) -> None:
        super().__init__()
        self.window, self._norm_before_residual = window, norm_before_residual
        self.self_attn = Attention(shape, 2 * shape.hidden_size if is_first else None)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.norm_eps) if is_first else None

    def forward(
        self,
        embedded: Tensor,
        state: Tensor,
        at: Rotation,
        context: KeyValues | None,
        before: Sequence[KeyValues],
        context_lens: Tensor,
    ) -> tuple[Tensor, KeyValues]:
        """States of blocks, [A, g, d], with their keys and values.

        Args:
            context: of the rows of the sequence, [n, ...]; None: those of the blocks, which are one row each.
            before: of earlier rows of the same drafts, [A, 1, ...] each.
            context_lens: context rows that each block sees, [A].
        """
        if self.hidden_norm is None:
            x = self.input_layernorm(state)
        else:
            normed = self.hidden_norm(state)
            x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            state = normed if self._norm_before_residual else state
        attention = self.self_attn
        own = attention.keys_values(x, at)
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*before, own, strict=True))
        seen = keys, values
        if context is None:
            context, seen = (own[0][:, 0], own[1][:, 0]), (own[0][:, :0], own[1][:, :0])
        attended = attend(attention.queries(x, at), context, seen, context_lens, self.window, is_causal=x.shape[1] > 1)
        state = state + attention.o_proj(attended.flatten(-2))
        return state + self.mlp(self.post_attention_layernorm(state)), own
