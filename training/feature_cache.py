"""Caches of the target's hidden states: computing them again costs as much as a training step."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.corpus import TargetAnswer


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The target's states over one answer with its prompt, n tokens."""

    features: Tensor  # [n, len(layers) * hidden] in the target's dtype; the last ``hidden`` columns are the final layer
    normalisers: Tensor  # fp32 [n]: log sum exp of the logits; NaN before the prompt's last token, where nobody drafts

    @property
    def num_bytes(self) -> int:
        return self.features.nbytes + self.normalisers.nbytes


class FeatureCache(Protocol):
    def find(self, answer: TargetAnswer) -> HiddenStates | None: ...

    def keep(self, answer: TargetAnswer, states: HiddenStates) -> None:
        """Stores them if there is capacity."""


class InMemory:
    """Up to ``max_bytes`` on the target's device."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        self._kept: dict[str, HiddenStates] = {}

    def find(self, answer: TargetAnswer) -> HiddenStates | None:
        return self._kept.get(answer.name)

    def keep(self, answer: TargetAnswer, states: HiddenStates) -> None:
        if states.num_bytes <= self._free_bytes:
            self._kept[answer.name] = states
            self._free_bytes -= states.num_bytes


def delete_partial_files(folder: Path) -> None:
    """Deletes unfinished files of a killed run, while no process writes."""
    for path in folder.glob("*.partial"):
        path.unlink()


class OnDisk:
    """One file per answer, named by a hash of its tokens, the layers and the target's weights and dtype, ``target``.

    ``max_bytes``: of all files in the folder, divided between ``num_processes`` writers.
    """

    def __init__(self, folder: Path, layers: Sequence[int], target: str, max_bytes: int, num_processes: int = 1) -> None:
        self._folder = folder
        self._layers, self._target = tuple(layers), target
        self._partial = f".{uuid4().hex}.partial"  # unique to this process
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = max_bytes - sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self._free_bytes = free_bytes // num_processes

    def find(self, answer: TargetAnswer) -> HiddenStates | None:
        try:
            with safe_open(self._path(answer), framework="pt") as file:
                return HiddenStates(file.get_tensor("features"), file.get_tensor("normalisers"))
        except (FileNotFoundError, SafetensorError):  # a damaged file is computed anew and replaced
            return None

    def keep(self, answer: TargetAnswer, states: HiddenStates) -> None:
        if states.num_bytes > self._free_bytes:
            return
        path = self._path(answer)
        partial = path.with_suffix(self._partial)
        save_file({"features": states.features, "normalisers": states.normalisers}, partial)
        partial.replace(path)
        self._free_bytes -= states.num_bytes

    def _path(self, answer: TargetAnswer) -> Path:
        what = repr((self._target, self._layers, answer.prompt_len, answer.token_ids))
        return self._folder / f"{hashlib.blake2b(what.encode(), digest_size=16).hexdigest()}.safetensors"
