"""The frozen target's hidden states over answers, computed when needed and cached."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.batch_layout import PackedSpan
from engine.kv_cache import KvCache
from training.corpus import TargetAnswer, packed
from training.frozen import FrozenTarget


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


_BLOCK_LEN = 32
_HEAD_ROWS = {"cpu": 64, "cuda": 1024}  # of full-vocabulary logits at once; on a CPU they must fit its cache


class HiddenStateReader:
    """``layers``: ascending, ending with the last layer; ``max_pass_tokens``: of answers computed together, or of one."""

    def __init__(self, target: FrozenTarget, layers: Sequence[int], cache: FeatureCache, max_pass_tokens: int) -> None:
        if layers[-1] != target.model.config.num_layers - 1 or list(layers) != sorted(set(layers)):
            raise ValueError(f"layers {list(layers)} must ascend, and end with the target's last")
        self._target = target
        self.layers = tuple(layers)
        self._cache = cache
        self._max_pass_tokens = max_pass_tokens
        self._kv_cache: KvCache | None = None

    def read(self, answers: Sequence[TargetAnswer]) -> list[HiddenStates]:
        """In the order of ``answers``."""
        found = {a.name: states for a in answers if (states := self._cache.find(a)) is not None}
        for part in packed([a for a in answers if a.name not in found], self._max_pass_tokens):
            found.update(self._compute(part))
        return [found[a.name] for a in answers]

    def _compute(self, answers: Sequence[TargetAnswer]) -> dict[str, HiddenStates]:
        lens = [len(a.token_ids) for a in answers]
        num_blocks = [-(-length // _BLOCK_LEN) for length in lens]
        kv_cache = self._kv_cache_of(sum(num_blocks))
        tables = torch.arange(sum(num_blocks), dtype=torch.int32).split(num_blocks)
        spans = [PackedSpan(0, a.token_ids, table.numpy()) for a, table in zip(answers, tables, strict=True)]
        features = self._target.model.forward_with_hidden_states(spans, kv_cache, self.layers).features
        found = {}
        for answer, part in zip(answers, features.split(lens), strict=True):
            # Clones are no inference tensors, so autograd may save them for the backward pass.
            states = HiddenStates(part.clone(), self._normalisers(part, answer.prompt_len - 1).clone())
            self._cache.keep(answer, states)
            found[answer.name] = states
        return found

    def _normalisers(self, features: Tensor, first: int) -> Tensor:
        """Of one answer; NaN before row ``first``."""
        model = self._target.model
        hidden = features[max(0, first) :, -model.config.hidden_size :].contiguous()
        parts = [model.logits(part).float().logsumexp(-1) for part in hidden.split(_HEAD_ROWS[features.device.type])]
        skipped = torch.full((len(features) - len(hidden),), torch.nan, device=features.device)
        return torch.cat([skipped, *parts])

    def _kv_cache_of(self, num_blocks: int) -> KvCache:
        if self._kv_cache is None or self._kv_cache.num_blocks < num_blocks:
            self._kv_cache = self._target.model.new_cache(num_blocks, _BLOCK_LEN)
        return self._kv_cache
