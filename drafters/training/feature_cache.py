"""Where readings of the frozen target are kept: reading an answer again costs as much as learning from it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafters.training.corpus import Answer
from drafters.training.hidden_states import Reading


class InMemory:
    """On the target's device, up to ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._kept: dict[tuple[str, float], Reading] = {}

    def find(self, answer: Answer) -> Reading | None:
        return self._kept.get((answer.key, answer.temperature))

    def keep(self, answer: Answer, reading: Reading) -> None:
        if reading.num_bytes <= self._room:
            self._kept[answer.key, answer.temperature] = reading
            self._room -= reading.num_bytes


def sweep(folder: Path) -> None:
    """Deletes what a killed run left half-written. Nobody may be writing there."""
    for path in folder.glob("*.partial"):
        path.unlink()


class OnDisk:
    """A file for each answer, named by its tokens and by what was read, so that a run that was cut off and the next drafter
    find it. Several processes may share a folder, and read the same answer at the same time.

    Args:
        layers: as of ``Readings``.
        target: what the states are of: weights and dtype.
        max_bytes: of all files in the folder, whichever of ``num_processes`` writes them.
    """

    def __init__(self, folder: Path, layers: Sequence[int], target: str, max_bytes: int, num_processes: int = 1) -> None:
        self._folder = folder
        self._layers, self._target = tuple(layers), target
        self._partial = f".{uuid4().hex}.partial"  # of no other process, on whatever machine
        folder.mkdir(parents=True, exist_ok=True)
        room = max_bytes - sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self._room = room // num_processes

    def find(self, answer: Answer) -> Reading | None:
        try:
            with safe_open(self._path(answer), framework="pt") as file:
                return Reading(file.get_tensor("features"), file.get_tensor("normalisers"))
        except (FileNotFoundError, SafetensorError):  # a damaged one is read anew, and replaced
            return None

    def keep(self, answer: Answer, reading: Reading) -> None:
        if reading.num_bytes > self._room:
            return
        path = self._path(answer)
        partial = path.with_suffix(self._partial)
        save_file({"features": reading.features, "normalisers": reading.normalisers}, partial)
        partial.replace(path)
        self._room -= reading.num_bytes

    def _path(self, answer: Answer) -> Path:
        what = repr((self._target, self._layers, answer.prompt_len, answer.token_ids))
        return self._folder / f"{hashlib.blake2b(what.encode(), digest_size=16).hexdigest()}.safetensors"
