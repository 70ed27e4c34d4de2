"""EAGLE-3 and P-EAGLE as served: fused weights, the engine's operators, a paged cache of its layers. The reference is
``eagle_network.py``."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.types import MAX_DRAFT_LEN
from drafters.hidden_states.eagle_network import EagleNetwork
from drafters.hidden_states.stage import (
    BegunStates,
    DraftRows,
    FusedStage,
    KnownStates,
    StateInputs,
    attending,
    decoder_layer,
    norm_weight,
    repeat_last,
)
from engine.batch_layout import Layout, PackedSpan
from engine.device import to_device
from engine.kv_cache import KvCache


class EagleStage(FusedStage):
    """``Stage`` of EAGLE-3 and P-EAGLE. ``int8``: multiplies int8 weights, where the device supports it."""

    shift: ClassVar[int] = 1

    def __init__(self, network: EagleNetwork, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> None:
        super().__init__(network, dtype, device, int8=int8)
        self.config = config = network.config
        self.max_len = MAX_DRAFT_LEN if config.mask_token_id is None else config.draft_len
        self._network = network  # its norms over features, which are few
        self._layers = [decoder_layer(self._ops, dtype, device, x, is_plain=i > 0) for i, x in enumerate(network.layers)]
        self._hidden_norm = norm_weight(network.layers[0].get_submodule("hidden_norm"), device)
        for norm in (network.input_norm, network.fc_norm):
            if norm is not None:
                norm.to(device)
        self._mask_state = None
        if network.mask_hidden is not None:
            self._mask_state = self._combine(network.mask_hidden.detach()[0].to(device, dtype))

    def num_rows(self, num_tokens: int) -> int:
        return num_tokens

    def feature_rows(self, start: int, last: int) -> tuple[int, int]:
        return start, last + 1

    @torch.inference_mode()
    def begin(self, drafts: Sequence[DraftRows], features: Tensor, cache: KvCache) -> BegunStates:
        lens = [draft.last + 1 - draft.start for draft in drafts]
        rows = [np.arange(draft.features, draft.features + num) for draft, num in zip(drafts, lens, strict=True)]
        states = self._combine(features[to_device(np.concatenate(rows), features.device)])
        if self._mask_state is not None:
            return self._masked(drafts, states, lens, cache)
        spans = [PackedSpan(draft.start, draft.token_ids, draft.block_table) for draft in drafts]
        hidden, states = self.run(self.layouts.lay_out(spans, cache), states, cache)
        last = to_device(np.array(list(accumulate(lens))) - 1, hidden.device)
        return _Drafts(self, drafts, hidden[last], states[last], cache)

    def _masked(self, drafts: Sequence[DraftRows], states: Tensor, lens: Sequence[int], cache: KvCache) -> KnownStates:
        """P-EAGLE. Shorter drafts are padded by copies of their last state."""
        assert self._mask_state is not None
        assert self.config.mask_token_id is not None
        spans, rows, wanted, end = [], [], [], 0
        most = max(draft.num_rows for draft in drafts)
        for draft, own_end, length in zip(drafts, accumulate(lens), lens, strict=True):
            num = draft.num_rows - 1
            spans.append(PackedSpan(draft.start, (*draft.token_ids, *(self.config.mask_token_id,) * num), draft.block_table))
            rows += [np.arange(own_end - length, own_end), np.full(num, len(states))]
            end += length + num
            wanted.append(np.minimum(np.arange(end - draft.num_rows, end - draft.num_rows + most), end - 1))
        inputs = torch.cat([states, self._mask_state])[to_device(np.concatenate(rows), states.device)]
        hidden, _ = self.run(self.layouts.lay_out(spans, cache), inputs, cache)
        return KnownStates(hidden[to_device(np.stack(wanted), hidden.device)])

    @torch.inference_mode()
    def run(self, layout: Layout, states: Tensor, cache: KvCache) -> tuple[Tensor, Tensor]:
        """The normed output in the dtype, and what is fed back, fp32: both [rows, d]. ``states``: fp32."""
        embedded = F.embedding(layout.token_ids, self._embedding).float()
        ops, size = self._ops, states.shape[1]
        first = self._layers[0]
        x = torch.empty(len(states), 2 * size, dtype=self.placement[0], device=states.device)
        x[:, :size] = ops.add_norm(embedded, None, first.parts.input_norm)
        residual = states.clone()
        x[:, size:] = normed = ops.add_norm(residual, None, self._hidden_norm)
        if self.config.norm_before_residual:
            residual = normed.to(torch.float32, copy=True)
        attends = self._attending(layout, cache.block_len)
        kv = [(cache.keys[i], cache.values[i]) for i in range(len(self._layers))]
        delta = first.run_behind_norm(layout, x, residual, kv[0], attends[0])
        for layer, own, of_layer in zip(self._layers[1:], kv[1:], attends[1:], strict=True):
            delta = layer.run(layout, residual, delta, own, of_layer)
        hidden = ops.add_norm(residual, delta, self._final_norm)
        return hidden, hidden.float() if self.config.norm_output else residual

    def _attending(self, layout: Layout, block_len: int) -> list[Layout]:
        ends = layout.positions
        return [
            layout if window is None else attending(layout, ends, ends + 1 - window, block_len)
            for window in self.config.layer_windows
        ]

    def _combine(self, features: Tensor) -> Tensor:
        """fp32 [rows, d]"""
        network = self._network
        if network.input_norm is not None:
            features = network.input_norm(features)
        if len(network.fc_norm):
            parts = zip(network.fc_norm, features.chunk(len(network.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self._fc(features).float()


class _Drafts(BegunStates):
    """``States`` of EAGLE-3: a row for each token. ``layouts``: of the rows of all drafts from the second token on, if they
    are on the device."""

    def __init__(
        self,
        stage: EagleStage,
        drafts: Sequence[DraftRows],
        hidden: Tensor,
        states: Tensor,
        cache: KvCache,
        layouts: Sequence[Layout] = (),
    ) -> None:
        self._stage, self._drafts, self._cache, self._layouts = stage, drafts, cache, layouts
        self._hidden, self._states = hidden, states

    def step(self, k: int, live: Sequence[int], token_ids: Tensor) -> Tensor:
        if k == 0:
            return self._hidden
        if self._layouts:
            layout = replace(self._layouts[k - 1], token_ids=token_ids)
            hidden, self._states = self._stage.run(layout, self._states, self._cache)
            return hidden
        rows = to_device(np.array(live), self._states.device)
        layout = self._stage.layouts.lay_out([_row(self._drafts[i], k) for i in live], self._cache)
        hidden, self._states[rows] = self._stage.run(replace(layout, token_ids=token_ids), self._states[rows], self._cache)
        return hidden

    def inputs(self, num_drafts: int, num_steps: int) -> StateInputs:
        num_more = num_drafts - len(self._drafts)
        drafts = [*self._drafts, *repeat(self._drafts[-1], num_more)]
        packed = [self._stage.layouts.pack([_row(draft, k) for draft in drafts], self._cache) for k in range(1, num_steps)]
        given = (repeat_last(self._hidden, num_more), repeat_last(self._states, num_more))

        def states(parts: Sequence[Tensor]) -> _Drafts:
            hidden, own, *buffers = parts
            layouts = [host.layout(buffer) for host, buffer in zip(packed, buffers, strict=True)]
            return _Drafts(self._stage, drafts, hidden, own, self._cache, layouts)

        return StateInputs((*given, *(host.buffer for host in packed)), states)


def _row(draft: DraftRows, k: int) -> PackedSpan:
    """Of token ``k``. The rows of a draft that needs no more tokens are computed again, where others of its batch do."""
    return PackedSpan(draft.last + min(k, draft.num_rows - 1), (0,), draft.block_table)
