"""Adapters: small files that make a trained drafter a specialist.

For a matrix W of the drafter a file holds U and D of W + U D (LoRA, arXiv 2106.09685); norms, a bias and the confidence head
it holds whole.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from cluster.errors import ModelUnavailable
from drafters.shipped import ADAPTER_SUFFIX, ADAPTERS, adapters_of

# Ends of the names of the matrices that are changed: not those over the target's features, some of which are very large.
CHANGED = ("_proj", "anchor_input.maps", "markov_w2")
UP, DOWN = ".up", ".down"


def find_adapter(drafter: Path, name_or_path: str) -> Path:
    """A file, or an adapter in the folder of ``drafter`` by name. Raises ModelUnavailable."""
    for path in (drafter / ADAPTERS / (name_or_path + ADAPTER_SUFFIX), Path(name_or_path).expanduser()):
        if path.is_file():
            return path
    known = ", ".join(adapters_of(str(drafter))) or "none"
    raise ModelUnavailable(f"{name_or_path}: no adapter of {drafter.name}; it has: {known}")


@torch.no_grad()
def apply_adapter(path: Path, network: nn.Module) -> None:
    """Merges an adapter into ``network``. Raises ModelUnavailable if the file is no adapter or one of another drafter."""
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        own = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        for name in [name for name in tensors if not name.endswith(DOWN)]:
            if name.endswith(UP):
                of = name.removesuffix(UP)
                own[of].add_(tensors[name] @ tensors[of + DOWN])
            else:
                own[name].copy_(tensors[name].reshape(own[name].shape))
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise ModelUnavailable(f"{path} is no adapter of this drafter ({error})") from error
