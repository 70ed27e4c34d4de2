"""Training of an EAGLE-3 drafter: its initialisation, and its storage in the speculators format."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.hidden_states.checkpoint import save_speculators
from drafters.hidden_states.config import EagleConfig
from drafters.hidden_states.eagle_network import EagleNetwork
from training.batches import AnswerBatch
from training.hidden_state_student import HiddenStateStudent, Positions


class EagleStudent(HiddenStateStudent):
    """The projection of the features has no bias: ``mean`` is 0, and ``std`` their root mean square."""

    config: EagleConfig
    network: EagleNetwork

    def positions(self, batch: AnswerBatch, previous: Tensor) -> Positions:
        features = self.standardised(batch.features)
        return Positions(self.network(features, batch.token_ids, batch.lens, batch.anchors, batch.block_len))

    def logits(self, hidden: Tensor, latents: Tensor | None) -> Tensor:
        return self.network.logits(hidden)

    @torch.no_grad()
    def initialise(self, batches: Iterable[AnswerBatch]) -> None:
        """Starts as the best linear predictor of the target's next final hidden state from the features alone, with layers
        that add nothing yet."""
        network, d = self.network, self.config.shape.hidden_size
        num_target, first = self._target.model.config.num_layers, network.layers[0]
        layers = [_Half(first), *network.layers[1:]]
        self._target.copy_layers(layers, range(num_target - len(layers), num_target), network.norm)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = first.get_submodule(f"self_attn.{name}").get_parameter("weight")
            weight[:, :d] = weight[:, d:]  # of the embedding, whose norm is the target's too
        for layer in network.layers:
            nn.init.zeros_(layer.get_submodule("self_attn.o_proj").get_parameter("weight"))
            nn.init.zeros_(layer.get_submodule("mlp.down_proj").get_parameter("weight"))
        network.norm.weight.mul_(self.regress_features(batches))

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        network = copy.deepcopy(self.network)
        network.fc.weight.div_(self.std)
        shape = json.loads((self._target.folder / "config.json").read_text())
        save_speculators(network, folder, shape, self._target.info.name)


class _Half(nn.Module):
    """The parameters of a first layer that its target's layer has, too: those that read the state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
        for name, parameter in self._layer.named_parameters():
            if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
                yield name, parameter[:, parameter.shape[1] // 2 :]
            elif name != "hidden_norm.weight":
                yield name, parameter
