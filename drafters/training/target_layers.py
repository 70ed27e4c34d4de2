"""Layers of the target under their Hugging Face names: where drafters begin."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from cluster.errors import ModelUnavailable


def read_layers(folder: Path, indices: Sequence[int]) -> list[dict[str, Tensor]]:
    """Of each layer its tensors, fp32, named as within it (``self_attn.q_proj.weight``)."""
    layers: list[dict[str, Tensor]] = [{} for _ in indices]
    wanted = {f"model.layers.{index}.": tensors for index, tensors in zip(indices, layers, strict=True)}
    for name, tensor in _tensors(folder, tuple(wanted)).items():
        prefix = ".".join(name.split(".")[:3]) + "."
        wanted[prefix][name.removeprefix(prefix)] = tensor
    if not all(layers):
        raise ModelUnavailable(f"{folder}: its safetensors files do not hold the layers {list(indices)}")
    return layers


def read_final_norm(folder: Path) -> Tensor:
    return _tensors(folder, ("model.norm.weight",))["model.norm.weight"]


def _tensors(folder: Path, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    found = {}
    with ExitStack() as stack:
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name.startswith(prefixes):
                    found[name] = file.get_tensor(name).float()
    return found
