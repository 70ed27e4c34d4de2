"""The frozen target's hidden states over answers, computed when needed and cached."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch_layout import PackedSpan
from engine.kv_cache import KvCache
from training.corpus import TargetAnswer, packed
from training.feature_cache import FeatureCache, HiddenStates
from training.frozen import FrozenTarget

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
