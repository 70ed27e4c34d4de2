"""Adapters of a trained block drafter: low-rank changes of its matrices (LoRA, arXiv 2106.09685)."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from drafters.hidden_states.adapter import CHANGED, DOWN, UP
from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.heads import ConfidenceHead
from drafters.hidden_states.modules import RmsNorm
from engine.models.int8 import quantise
from training.block_student import BlockStudent


class LowRank(nn.Module):
    """W + U D of W [out, in], with U [out, rank], at first 0, and D [rank, in]."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        num_out, num_in = weight.shape
        self.up = nn.Parameter(torch.zeros(num_out, rank, device=weight.device))
        self.down = nn.Parameter(torch.randn(rank, num_in, device=weight.device) * num_in**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_low_rank(network: BlockNetwork, rank: int) -> dict[str, nn.Parameter]:
    """Freezes ``network`` but for its norms and the confidence head, and adds a change of ``rank`` to each of the matrices
    that adapters change. Returns what is trained, by name."""
    network.requires_grad_(False)
    for path, module in list(network.named_modules()):
        is_raw = path == "anchor_input.maps" and network.config.anchor_input_rank is None  # over the features themselves
        if path.endswith(CHANGED) and isinstance(module, nn.Linear) and not is_raw:
            parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))
        if isinstance(module, RmsNorm | ConfidenceHead):
            module.requires_grad_()
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def adapter_tensors(student: BlockStudent) -> dict[str, Tensor]:
    """What `drafters.hidden_states.adapter` merges into the drafter over raw features. Rounds the changes to bf16, also in
    ``student``."""
    tensors: dict[str, Tensor] = {}
    for path, module in student.network.named_modules():
        if isinstance(module, LowRank):
            of = path.removesuffix(".parametrizations.weight.0") + ".weight"
            for suffix, factor in ((UP, module.up), (DOWN, module.down)):
                tensors[of + suffix] = factor.bfloat16()
                factor.copy_(tensors[of + suffix])
        elif isinstance(module, RmsNorm | ConfidenceHead):
            tensors |= {f"{path}.{name}": parameter.detach().float() for name, parameter in module.named_parameters()}
    anchor_input = student.network.anchor_input
    if anchor_input is not None and isinstance(anchor_input.reduce, nn.Linear):
        # The features' means pass through the changed maps: their bias takes them out, as rounded in serving.
        means = (anchor_input.reduce.weight[:, : len(student.std)] / student.std) @ student.mean
        shift = quantise(anchor_input.maps.weight).dequantised() @ means
        tensors["anchor_input.maps.bias"] = anchor_input.maps.bias - shift
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
