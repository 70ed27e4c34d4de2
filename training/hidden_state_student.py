"""Training of a drafter that reads hidden states: its losses."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafters.hidden_states.checkpoint import new_network
from drafters.hidden_states.config import BlockConfig, EagleConfig
from drafters.hidden_states.modules import output_rows
from training.batches import AnswerBatch
from training.frozen import FrozenTarget
from training.losses import Losses, TargetDistribution, distillation, position_weights

_Embed = Callable[[Tensor], Tensor]
_RIDGE = 0.1  # relative to the Gram matrix's diagonal


class Positions(NamedTuple):
    """Of the drafts of a batch: [A, block_len, ...] each."""

    hidden: Tensor
    latents: Tensor | None = None
    confidence_logits: Tensor | None = None


class Regression(NamedTuple):
    """``by_token``: the part of the next token's embedding, [d, d] or [d, 0]; ``size``: mean one of the last predictions."""

    by_token: Tensor
    size: float


class HiddenStateStudent(nn.Module):
    """A network over features standardised by ``mean`` and ``std``, [feature_size], which ``save`` folds into weights. They
    are the first columns of a batch's features."""

    mean: Tensor
    std: Tensor
    output_rows: Tensor
    weights: Tensor

    def __init__(self, config: BlockConfig | EagleConfig, target: FrozenTarget, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.config = config
        self._target = target
        self.network = new_network(config, target.rows).train()
        vocabulary = None if config.draft_token_ids is None else torch.tensor(config.draft_token_ids)
        rows = output_rows(vocabulary, config.shape.vocab_size, outside=-1)
        buffers = {"mean": mean, "std": std, "output_rows": rows, "weights": position_weights(config.draft_len)}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    @abstractmethod
    def positions(self, batch: AnswerBatch, previous: Tensor) -> Positions:
        """``previous``: int64 [A, block_len], the token before each."""

    @abstractmethod
    def logits(self, hidden: Tensor, latents: Tensor | None) -> Tensor: ...

    def standardised(self, features: Tensor) -> Tensor:
        return (features[:, : len(self.mean)].float() - self.mean) / self.std

    def regress_features(
        self, batches: Iterable[AnswerBatch], embed: Callable[[Tensor], Tensor] | None = None
    ) -> Regression:
        """Sets the projection of the features, without a bias, to the best linear predictor of the target's next final
        hidden state, from the features and the embedding of the next token by ``embed``, if it is given."""
        network, d, num_features = self.network, self.config.shape.hidden_size, len(self.mean)
        num_in = num_features + (d if embed is not None else 0)
        gram, cross = torch.zeros(num_in, num_in, dtype=torch.float64), torch.zeros(num_in, d, dtype=torch.float64)
        for batch in batches:
            starts = torch.tensor([0, *batch.lens], device=batch.anchors.device).cumsum(0)
            rows = torch.arange(len(batch.token_ids) - 1, device=batch.anchors.device)
            rows = rows[~torch.isin(rows + 1, starts)]
            x = self.standardised(batch.features[rows])
            if embed is not None:
                x = torch.cat([x, embed(batch.token_ids[rows + 1])], dim=1)
            wanted = batch.features[rows + 1, -d:].float() / network.norm.weight
            gram += (x.T @ x).cpu()
            cross += (x.T @ wanted).cpu()
        gram += _RIDGE * gram.diagonal().diag()
        found = torch.linalg.solve(gram, cross).T.float().to(x)
        network.fc.weight.copy_(found[:, :num_features])
        return Regression(found[:, num_features:], float((x @ found.T).square().mean(-1).sqrt().mean()))

    def forward(self, batch: AnswerBatch, progress: float) -> Losses:
        """Losses of all drafts; ``acceptance`` is [A, batch.block_len], NaN behind the end of a sequence."""
        block = batch.block_len
        rows = batch.anchors[:, None] + torch.arange(block, device=batch.anchors.device)  # whose next token is predicted
        has_truth = rows + 1 < batch.ends[:, None]
        last = len(batch.token_ids) - 1
        known = rows.clamp_max(last)
        hidden, latents, confidence = self.positions(batch, batch.token_ids[known])
        wanted = known[has_truth]
        losses = distillation(
            self.logits(hidden[has_truth], None if latents is None else latents[has_truth]),
            TargetDistribution.at(batch.features, batch.normalisers, wanted, self.network.lm_head.weight),
            self.output_rows[batch.token_ids[(wanted + 1).clamp_max(last)]],
            self.weights[:block].expand_as(rows)[has_truth],
            progress,
            None if confidence is None else confidence[has_truth],
        )
        acceptance = torch.full(rows.shape, torch.nan, device=rows.device)
        acceptance[has_truth] = losses.acceptance
        return replace(losses, acceptance=acceptance)
