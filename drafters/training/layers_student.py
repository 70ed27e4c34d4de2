"""Distillation of a drafter made of a few layers of its target: autoregressive, token by token."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.layers import save_layers
from drafters.training.batches import Batch
from drafters.training.hidden_states import Rows
from drafters.training.losses import Losses, TargetDistribution, distillation
from drafters.training.recipe import STORED
from drafters.training.target_layers import read_final_norm, read_layers
from drafters.training.vocabulary import positions_in


class LayersStudent(nn.Module):
    """Args:
    folder: of the target, whose layers ``indices`` it begins with.
    vocabulary: of its head, ascending token ids; None: the whole one.
    """

    head: Tensor
    places: Tensor

    def __init__(self, folder: Path, indices: Sequence[int], rows: Rows, vocabulary: Tensor | None) -> None:
        from transformers import AutoConfig, AutoModel

        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = len(indices)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: len(indices)]
        self.model = AutoModel.from_config(config).float().train()
        self.model.embed_tokens.weight.requires_grad_(False).copy_(rows.embedding)
        self._indices = tuple(indices)
        self._vocabulary = vocabulary
        vocab_size = len(rows.embedding)
        self.register_buffer("head", rows.head if vocabulary is None else rows.head[vocabulary], persistent=False)
        self.register_buffer("places", positions_in(vocabulary, vocab_size), persistent=False)

    @torch.no_grad()
    def initialise(self, folder: Path) -> None:
        """The target's own layers and final norm."""
        for layer, tensors in zip(self.model.layers, read_layers(folder, self._indices), strict=True):
            layer.load_state_dict(tensors)
        self.model.norm.weight.copy_(read_final_norm(folder))

    def forward(self, batch: Batch, progress: float) -> Losses:
        """Losses at the anchors of a batch, each of which predicts the token after it; ``acceptance`` is [A]."""
        lens = torch.tensor(batch.lens, device=batch.token_ids.device)
        token_ids = nn.utils.rnn.pad_sequence(batch.token_ids.split(list(batch.lens)), batch_first=True)
        is_token = torch.arange(token_ids.shape[1], device=lens.device) < lens[:, None]
        out = self.model(input_ids=token_ids, attention_mask=is_token.long(), use_cache=False)
        hidden = out.last_hidden_state[is_token][batch.anchors]
        return distillation(
            F.linear(hidden, self.head),
            TargetDistribution.at(batch.features, batch.normalisers, batch.anchors, self.head),
            self.places[batch.token_ids[batch.anchors + 1]],
            torch.ones(len(batch.anchors), device=hidden.device),
            progress,
        )

    def save(self, folder: Path, target_folder: Path) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        save_layers(folder, target_folder, tensors, self._vocabulary, STORED)
