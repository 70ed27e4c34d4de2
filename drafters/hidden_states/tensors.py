"""The weights of a drafter's folder: safetensors, or a pickled ``pytorch_model.bin`` as EAGLE-3's authors release."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cluster.errors import ModelUnavailable
from engine.models.weights import INDEX, SINGLE, SafetensorsFolder

PICKLED = "pytorch_model.bin"


class Tensors(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises ModelUnavailable: it is missing, or of another shape or kind."""

    def integers(self, name: str) -> Tensor: ...


@contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
    """Raises ModelUnavailable: they are missing or damaged."""
    with ExitStack() as stack:
        is_pickled = (folder / PICKLED).exists() and not any((folder / name).exists() for name in (SINGLE, INDEX))
        yield _Pickled(folder / PICKLED) if is_pickled else SafetensorsFolder(folder, stack)


class _Pickled:
    """Only tensors are unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found = dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # whatever bytes that are no pickle lead to
            raise ModelUnavailable(f"{path} is no file of tensors ({error})") from error
        self._tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None or not tensor.is_floating_point() or tuple(tensor.shape) != shape:
            found = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ModelUnavailable(f"{self._path}: tensor {name} of shape {shape} is expected, there is {found}")
        return tensor

    def integers(self, name: str) -> Tensor:
        return self._tensors[name]
