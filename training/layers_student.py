"""Training of an autoregressive drafter made of a few layers of its target."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.hidden_states.modules import output_rows
from drafters.layers import save_layers
from training.batches import AnswerBatch
from training.frozen import FrozenTarget
from training.losses import Losses, TargetDistribution, distillation
from training.recipe import STORED


class LayersStudent(nn.Module):
    """``indices``: of the target's layers; ``vocabulary``: of its head, ascending token ids, None for all."""

    head: Tensor
    output_rows: Tensor

    def __init__(self, target: FrozenTarget, indices: Sequence[int], vocabulary: Tensor | None) -> None:
        from transformers import AutoConfig, AutoModel

        super().__init__()
        config = AutoConfig.from_pretrained(target.folder)
        config.num_hidden_layers = len(indices)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: len(indices)]
        self.model = AutoModel.from_config(config).float().train()
        rows = target.rows
        self.model.embed_tokens.weight.requires_grad_(False).copy_(rows.embedding)
        self._target, self._indices, self._vocabulary = target, tuple(indices), vocabulary
        self.register_buffer("head", rows.head if vocabulary is None else rows.head[vocabulary], persistent=False)
        self.register_buffer("output_rows", output_rows(vocabulary, len(rows.head), outside=-1), persistent=False)

    def initialise(self, batches: Iterable[AnswerBatch] = ()) -> None:
        """Starts from the target's layers and final norm; reads no ``batches``."""
        self._target.copy_layers(self.model.layers, self._indices, self.model.norm)

    def forward(self, batch: AnswerBatch, progress: float) -> Losses:
        """Losses of the tokens after the anchors; ``acceptance`` is [A]."""
        lens = torch.tensor(batch.lens, device=batch.token_ids.device)
        token_ids = nn.utils.rnn.pad_sequence(batch.token_ids.split(list(batch.lens)), batch_first=True)
        is_token = torch.arange(token_ids.shape[1], device=lens.device) < lens[:, None]
        out = self.model(input_ids=token_ids, attention_mask=is_token.long(), use_cache=False)
        hidden = out.last_hidden_state[is_token][batch.anchors]
        return distillation(
            F.linear(hidden, self.head),
            TargetDistribution.at(batch.features, batch.normalisers, batch.anchors, self.head),
            self.output_rows[batch.token_ids[batch.anchors + 1]],
            torch.ones(len(batch.anchors), device=hidden.device),
            progress,
        )

    def save(self, folder: Path) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        save_layers(folder, self._target.folder, tensors, self._vocabulary, STORED)
