"""DSpark's sequential heads and confidence head (equations 4 to 8). A sequential head turns the token before a position into
a latent u; the bias of the position's logits is W_2 u.

Shapes: latents and embeddings of previous tokens [..., r], hidden states of the backbone after its final norm [..., d].
"""

import torch
from torch import Tensor, nn

from drafters.hidden_states.config import BlockConfig


class MarkovHead(nn.Module):
    """Equation 5: the bias depends only on the token before, B(x, .) = W_1[x] W_2. The latent is W_1[x]."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.num_markov_rows, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.num_outputs, bias=False)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One position of any number of blocks: its latent, and the next state. State None begins a block."""
        return embedding, None

    def unroll(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """All positions of blocks with known previous tokens: [..., gamma, r] and [..., gamma, d] -> latents."""
        return self.step(embeddings, hidden, None)[0]


class GatedMarkovHead(MarkovHead):
    """The latent is W_1[x], each dimension gated by the token and the hidden state."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.shape.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, None


class RecurrentHead(MarkovHead):
    """Equation 6: a state s, initially 0, accumulates the block. ``joint_proj`` holds W_g, W_c, W_o over [s; W_1[x]; h]."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.shape.hidden_size, 3 * config.markov_rank)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        before = torch.zeros_like(embedding) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([before, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return torch.tanh(output), kept * before + (1 - kept) * torch.tanh(candidate)

    def unroll(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        state, latents = None, []
        for embedding, h in zip(embeddings.unbind(-2), hidden.unbind(-2), strict=True):
            latent, state = self.step(embedding, h, state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


class ConfidenceHead(nn.Module):
    """Equation 7: the logit of the probability that a draft survives, given that those before it do."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.shape.hidden_size + self.with_markov * config.markov_rank, 1)

    def forward(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """[...] from hidden states [..., d] and, if the head reads it, W_1 of the token before [..., r]."""
        x = hidden if embedding is None or not self.with_markov else torch.cat([hidden, embedding], dim=-1)
        logit: Tensor = self.proj(x)
        return logit.squeeze(-1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentHead}
