"""Families of drafters that read hidden states. A new one is a row here; names of kinds and layouts of files are in
``formats.py``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.block_stage import BlockStage
from drafters.hidden_states.config import BlockConfig, EagleConfig, NetworkConfig
from drafters.hidden_states.eagle_network import EagleNetwork
from drafters.hidden_states.eagle_stage import EagleStage
from drafters.hidden_states.stage import Stage

Network = BlockNetwork | EagleNetwork


class _Family(NamedTuple):
    """``stage``: its network on the target's device, for many requests at once."""

    network: Callable[[Any], Network]
    stage: Callable[..., Stage]


_FAMILIES: dict[type[NetworkConfig], _Family] = {
    BlockConfig: _Family(BlockNetwork, BlockStage),  # DSpark, DFlash
    EagleConfig: _Family(EagleNetwork, EagleStage),  # EAGLE-3, P-EAGLE
}


def make_network(config: NetworkConfig) -> Network:
    return _FAMILIES[type(config)].network(config)


def make_stage(network: Network, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> Stage:
    return _FAMILIES[type(network.config)].stage(network, dtype, device, int8=int8)
