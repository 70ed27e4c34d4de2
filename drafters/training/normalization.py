"""A DSpark network over standardised features, as it is trained, and the same over raw ones, as it is served."""

import torch
from torch import Tensor, nn

from drafters.dspark.network import DSparkNetwork
from engine.models.int8 import quantise


@torch.no_grad()
def fold(network: DSparkNetwork, mean: Tensor, std: Tensor) -> None:
    """Rewrites a network over standardised features as one over raw ones. Weights are rounded as they will be stored before
    the means are taken out: some features have means far from zero, which would turn the rounding into an error of the
    bias."""
    network.fc.weight.copy_(quantise(network.fc.weight / std, uneven=True).dequantised())
    network.fc.bias.sub_(network.fc.weight @ mean)
    first = _first_map(network)
    if first is not None:
        first.weight[:, : len(std)] /= std
        first.weight.copy_(quantise(first.weight, uneven=True).dequantised())
        _shift(network, first, mean, -1.0)


@torch.no_grad()
def unfold(network: DSparkNetwork, mean: Tensor, std: Tensor) -> None:
    """The inverse of ``fold`` for a network that was loaded, so is rounded already; of any standardisation, also of another
    than was folded in."""
    network.fc.bias.add_(network.fc.weight @ mean)
    network.fc.weight *= std
    first = _first_map(network)
    if first is not None:
        _shift(network, first, mean, 1.0)
        first.weight[:, : len(std)] *= std


def _first_map(network: DSparkNetwork) -> nn.Linear | None:
    """The matrix of the anchor's input that reads the features, in its first columns."""
    module = network.anchor_input
    if module is None:
        return None
    return module.reduce if isinstance(module.reduce, nn.Linear) else module.maps


def _shift(network: DSparkNetwork, first: nn.Linear, mean: Tensor, sign: float) -> None:
    """Adds to the bias what the means contribute, ``first`` being over raw features."""
    module = network.anchor_input
    assert module is not None
    shift = first.weight[:, : len(mean)] @ mean
    module.maps.bias.add_(sign * (shift if first is module.maps else quantise(module.maps.weight).dequantised() @ shift))
