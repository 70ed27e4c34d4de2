"""Training of a block drafter, DSpark or DFlash: its initialisation, and its storage."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.hidden_states.block_network import AnchorInput, BlockNetwork
from drafters.hidden_states.checkpoint import load_network, save_network, save_speculators
from drafters.hidden_states.config import BlockConfig
from engine.models.int8 import quantise
from training.batches import AnswerBatch
from training.hidden_state_student import HiddenStateStudent, Positions
from training.recipe import STORED
from training.regression import Samples, regress


class BlockStudent(HiddenStateStudent):
    """Of DSpark and DFlash."""

    config: BlockConfig
    network: BlockNetwork

    def positions(self, batch: AnswerBatch, previous: Tensor) -> Positions:
        features = self.standardised(batch.features)
        hidden = self.network(features, batch.token_ids, batch.lens, batch.anchors, batch.block_len)
        confidence = self.network.confidence_logits(hidden, previous) if self.config.has_confidence else None
        return Positions(hidden, self.network.latents(hidden, previous), confidence)

    def logits(self, hidden: Tensor, latents: Tensor | None) -> Tensor:
        return self.network.logits(hidden, latents)

    @torch.no_grad()
    def initialise(self, batches: Iterable[AnswerBatch]) -> None:
        """Starts as the best linear predictor of the target's final hidden states, with layers that add nothing yet. In the
        speculators format features are read by its layers alone: they start as the target's last ones."""
        network = self.network
        num_target = self._target.model.config.num_layers
        self._target.copy_layers(network.layers, range(num_target - len(network.layers), num_target), network.norm)
        if network.anchor_input is None:
            self.regress_features(batches)
            return
        for layer in network.layers:
            nn.init.zeros_(layer.get_submodule("self_attn.o_proj").get_parameter("weight"))
            nn.init.zeros_(layer.get_submodule("mlp.down_proj").get_parameter("weight"))
        last: list[AnswerBatch] = []

        def samples() -> Iterable[Samples]:
            for batch in batches:
                last[:] = [batch]
                yield self._samples(batch)

        regress(network, samples(), self.output_rows)
        network.norm.weight.mul_(self._prediction_size(last[0]))

    @torch.no_grad()
    def begin_with(self, folder: Path) -> None:
        """Starts as a saved drafter of the same configuration. Raises ModelUnavailable."""
        self.network.load_state_dict(load_network(folder, self._target.rows).state_dict())
        self._unfold()

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        network = copy.deepcopy(self.network)
        shape = json.loads((self._target.folder / "config.json").read_text())
        if network.anchor_input is None:
            network.fc.weight.div_(self.std)
            save_speculators(network, folder, shape | {"attention_bias": False}, self._target.info.name)
            return
        self._folded(network)
        save_network(network, folder, shape, STORED)

    def _prediction_size(self, batch: AnswerBatch) -> float:
        """Mean size of the predictions relative to the states: the final norm would scale all of them to full size."""
        features = self.standardised(batch.features)
        has_context = _has_context(batch, batch.anchors)
        x = self.network.block_inputs(features, batch.token_ids, batch.anchors, has_context, self.config.block_size)
        return float(x.square().mean(-1).sqrt().mean())

    def _samples(self, batch: AnswerBatch) -> Samples:
        """Regression samples of whole blocks: from the features before the anchor (or 0) and its embedding to the hidden
        states before the final norm's weights, less the network's own inputs."""
        block = self.config.block_size
        network = self.network
        anchors = batch.anchors[batch.anchors + block < batch.ends]
        rows = anchors[:, None] + torch.arange(block, device=anchors.device)
        wanted = batch.features[rows, -self.config.shape.hidden_size :].float() / network.norm.weight
        embedded = network.embed_tokens(batch.token_ids[rows])
        own = network.embed_tokens.weight[self.config.mask_token_id].expand_as(embedded).clone()
        own[:, 0] = embedded[:, 0]
        before = self.standardised(batch.features[(anchors - 1).clamp_min(0)]) * _has_context(batch, anchors)[:, None]
        return torch.cat([before, embedded[:, 0]], dim=-1), embedded, wanted - own

    def _folded(self, network: BlockNetwork) -> None:
        """Makes it a network over raw features, in place. Weights are rounded as stored before the means are taken out, as
        some means are large and would turn rounding into an error of the bias."""
        fc, anchor_input = network.fc, network.anchor_input
        fc.weight.copy_(quantise(fc.weight / self.std, uneven=True).dequantised())
        fc.bias.sub_(fc.weight @ self.mean)
        if anchor_input is not None:
            first = _feature_map(anchor_input)
            first.weight[:, : len(self.std)] /= self.std
            first.weight.copy_(quantise(first.weight, uneven=True).dequantised())
            anchor_input.maps.bias.sub_(self._mean_input(anchor_input))

    def _unfold(self) -> None:
        """The inverse of ``_folded`` for a loaded, hence rounded, network, with this run's standardisation."""
        fc, anchor_input = self.network.fc, self.network.anchor_input
        fc.bias.add_(fc.weight @ self.mean)
        fc.weight *= self.std
        if anchor_input is not None:
            anchor_input.maps.bias.add_(self._mean_input(anchor_input))
            _feature_map(anchor_input).weight[:, : len(self.std)] *= self.std

    def _mean_input(self, anchor_input: AnchorInput) -> Tensor:
        """What the features' means add to the block's inputs, with maps over raw features."""
        first = _feature_map(anchor_input)
        shift = first.weight[:, : len(self.mean)] @ self.mean
        return shift if first is anchor_input.maps else quantise(anchor_input.maps.weight).dequantised() @ shift


def _feature_map(anchor_input: AnchorInput) -> nn.Linear:
    """The matrix whose first columns read the features."""
    return anchor_input.reduce if isinstance(anchor_input.reduce, nn.Linear) else anchor_input.maps


def _has_context(batch: AnswerBatch, anchors: Tensor) -> Tensor:
    """Whether a token stands before each anchor in its sequence, bool [A]."""
    starts = torch.tensor([0, *batch.lens[:-1]], device=anchors.device).cumsum(0)
    return ~torch.isin(anchors, starts)
