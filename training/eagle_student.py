"""Training of an EAGLE-3 drafter: its initialisation, and its storage in the speculators format."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.hidden_states.checkpoint import save_speculators
from drafters.hidden_states.config import EagleConfig
from drafters.hidden_states.eagle_network import EagleNetwork
from drafters.hidden_states.modules import Attention
from training.batches import AnswerBatch
from training.hidden_state_student import HiddenStateStudent, Positions

_SELF_LOGIT = 12.0  # of attention to the own row; to others it is about 0


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
        """Starts as the best linear predictor of the target's next final hidden state from the features and the token behind
        them, which the first layer's attention, to its own row, adds. The rest of the layers adds nothing yet."""
        network = self.network
        num_target, first = self._target.model.config.num_layers, network.layers[0]
        layers = [_Half(first), *network.layers[1:]]
        self._target.copy_layers(layers, range(num_target - len(layers), num_target), network.norm)
        for layer in network.layers:
            nn.init.zeros_(layer.get_submodule("self_attn.o_proj").get_parameter("weight"))
            nn.init.zeros_(layer.get_submodule("mlp.down_proj").get_parameter("weight"))
        embedding, norm = network.embed_tokens.weight, first.get_submodule("input_layernorm")
        found = self.regress_features(batches, lambda token_ids: norm(embedding[token_ids].float()))
        attention = first.get_submodule("self_attn")
        assert isinstance(attention, Attention)
        _attend_to_own_row(attention, found.by_token, norm(embedding[:: max(1, len(embedding) // 4096)].float()))
        network.norm.weight.mul_(found.size)

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        network = copy.deepcopy(self.network)
        network.fc.weight.div_(self.std)
        shape = json.loads((self._target.folder / "config.json").read_text())
        save_speculators(network, folder, shape, self._target.info.name)


def _attend_to_own_row(attention: Attention, by_token: Tensor, embedded: Tensor) -> None:
    """Sets the attention of a first layer to add ``by_token`` [d, d] of the embedding, as far as its values have dimensions.
    Queries equal keys, which are random projections of the embedding, so that each row attends to itself. ``embedded``: of
    some tokens under the layer's norm, [n, d]."""
    d, size, head_dim = by_token.shape[1], attention.k_proj.out_features, attention.head_dim
    group = attention.q_proj.out_features // size
    u, s, v = torch.linalg.svd(by_token, full_matrices=False)
    norm = (_SELF_LOGIT / head_dim**0.5) ** 0.5  # of a key's mean dimension
    keys = torch.randn(size // head_dim, head_dim, d) * norm / embedded.square().sum(-1).mean().sqrt().cpu()
    for project in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        for parameter in project.parameters():
            nn.init.zeros_(parameter)
    for own in (*attention.q_norm.parameters(), *attention.k_norm.parameters()):
        nn.init.constant_(own, norm)
    attention.k_proj.weight[:, :d] = keys.flatten(0, 1)
    attention.q_proj.weight[:, :d] = keys.repeat_interleave(group, 0).flatten(0, 1)
    attention.v_proj.weight[: len(v[:size]), :d] = v[:size]
    out = F.pad((u * s)[:, :size], (0, size - len(v[:size])))
    attention.o_proj.weight.copy_(out.unflatten(1, (-1, head_dim)).repeat_interleave(group, 1).flatten(1) / group)


class _Half(nn.Module):
    """The parameters of a first layer that are taken over from its target's layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
        own = ("self_attn.", "hidden_norm.")
        yield from (one for one in self._layer.named_parameters() if not one[0].startswith(own))
