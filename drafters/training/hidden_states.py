"""What the frozen target makes of the answers: its hidden states, computed on the fly and kept while there is room."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafters.training.corpus import Answer
from drafters.training.frozen import FrozenTarget
from engine.kv_cache import KvCache
from engine.layout import PackedSpan
from engine.models.weights import open_weights

_BLOCK_LEN = 32
_HEAD_ROWS = {"cpu": 64, "cuda": 1024}  # of logits over the whole vocabulary at once: on a CPU they shall stay in its cache


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one answer with its prompt, n tokens.

    ``features``: hidden states of the chosen layers side by side, in the target's dtype, [n, len(layers) * hidden]; the last
    ``hidden`` columns are the final ones, from which its distribution follows. ``normalisers``: log sum exp of its logits,
    [n], fp32; NaN before the last token of the prompt, after which nobody drafts.
    """

    features: Tensor
    normalisers: Tensor

    @property
    def num_bytes(self) -> int:
        return self.features.nbytes + self.normalisers.nbytes


class FeatureCache(Protocol):
    """Readings that were made before (``drafters.training.feature_cache``)."""

    def find(self, answer: Answer) -> Reading | None: ...

    def keep(self, answer: Answer, reading: Reading) -> None:
        """While there is room."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The target's embedding and head, fp32 [vocab, hidden], frozen."""

    embedding: Tensor
    head: Tensor


def target_rows(target: FrozenTarget) -> Rows:
    with open_weights(target.folder, target.model.config, torch.float32) as weights:
        return Rows(weights.embedding().float().to(target.device), weights.head().float().to(target.device))


class HiddenStateReader:
    """Reads answers with the target.

    Args:
        layers: ascending, the last layer among them; as of ``CausalModel.forward_with_hidden_states``.
        kept: where they are looked up, and left for the next time.
        max_pass_tokens: answers are read together up to so many tokens, a longer one alone.
    """

    def __init__(self, target: FrozenTarget, layers: Sequence[int], kept: FeatureCache, max_pass_tokens: int) -> None:
        if layers[-1] != target.model.config.num_layers - 1:
            raise ValueError(f"layers {list(layers)} must end with the target's last")
        self._target = target
        self._layers = tuple(layers)
        self._kept = kept
        self._max_pass_tokens = max_pass_tokens
        self._cache: KvCache | None = None

    def of(self, answers: Sequence[Answer]) -> list[Reading]:
        """In the order of ``answers``, in as few passes as their lengths allow."""
        found = {_name(a): reading for a in answers if (reading := self._kept.find(a)) is not None}
        missing = [a for a in answers if _name(a) not in found]
        part: list[Answer] = []
        num_tokens = 0
        for answer in missing:
            if part and num_tokens + len(answer.token_ids) > self._max_pass_tokens:
                found.update(self._read(part))
                part, num_tokens = [], 0
            part.append(answer)
            num_tokens += len(answer.token_ids)
        if part:
            found.update(self._read(part))
        return [found[_name(a)] for a in answers]

    def _read(self, answers: Sequence[Answer]) -> dict[tuple[str, float], Reading]:
        model = self._target.model
        lens = [len(a.token_ids) for a in answers]
        num_blocks = [-(-length // _BLOCK_LEN) for length in lens]
        cache = self._cache_of(sum(num_blocks))
        spans, first = [], 0
        for answer, num in zip(answers, num_blocks, strict=True):
            table = torch.arange(first, first + num, dtype=torch.int32).numpy()
            spans.append(PackedSpan(0, answer.token_ids, table))
            first += num
        _, features = model.forward_with_hidden_states(spans, cache, self._layers)
        # Clones leave inference mode, so that what is trained may save them for its backward pass.
        readings = {}
        for answer, part in zip(answers, features.split(lens), strict=True):
            reading = Reading(part.clone(), self._normalisers(part, answer.prompt_len - 1).clone())
            self._kept.keep(answer, reading)
            readings[_name(answer)] = reading
        return readings

    def _normalisers(self, features: Tensor, first: int) -> Tensor:
        """Of one answer, from row ``first`` on."""
        model = self._target.model
        hidden = features[max(0, first) :, -model.config.hidden_size :].contiguous()
        parts = [model.logits(part).float().logsumexp(-1) for part in hidden.split(_HEAD_ROWS[features.device.type])]
        unread = torch.full((len(features) - len(hidden),), torch.nan, device=features.device)
        return torch.cat([unread, *parts])

    def _cache_of(self, num_blocks: int) -> KvCache:
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = self._target.model.new_cache(num_blocks, _BLOCK_LEN)
        return self._cache


def _name(answer: Answer) -> tuple[str, float]:
    return answer.key, answer.temperature
