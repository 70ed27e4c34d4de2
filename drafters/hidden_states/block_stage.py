"""The parallel stage of DSpark and DFlash as served: fused weights, the engine's operators, a paged cache of projected
features. The reference is ``block_network.py``.

The cache of each draft layer holds keys and values of the context, projected once, and behind them those of the current
block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.stage import (
    BegunStates,
    DraftRows,
    FusedStage,
    KnownStates,
    StateInputs,
    attending,
    context_span,
    decoder_layer,
    linear,
    norm_weight,
    repeat_last,
)
from engine.batch_layout import Layout, PackedSpan
from engine.device import to_device
from engine.factory import make_ops
from engine.kv_cache import KvCache
from engine.ops import Linear


class BlockStage(FusedStage):
    """``Stage`` of blocks. ``int8``: multiplies int8 weights, where the device supports it."""

    shift: ClassVar[int] = 0

    def __init__(self, network: BlockNetwork, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> None:
        super().__init__(network, dtype, device, int8=int8)
        self.config = config = network.config
        self.max_len, ops = config.draft_len, self._ops
        # A context has keys and values, but no queries.
        self._context_ops = make_ops(replace(config.shape, num_heads=0), dtype, device)
        self._hidden_norm = norm_weight(network.hidden_norm, device)
        attention = [layer.get_submodule("self_attn") for layer in network.layers]
        projections = [x.get_submodule(name) for x in attention for name in ("k_proj", "v_proj")]
        self._context_kv = linear(ops, dtype, device, *(x for x in projections if isinstance(x, torch.nn.Linear)))
        self._layers = [decoder_layer(ops, dtype, device, layer) for layer in network.layers]
        self._masks = (config.mask_token_id,) * (config.block_size - 1)
        self._anchor_input: list[Linear] = []
        if (anchor_input := network.anchor_input) is not None:
            products = [module for module in (anchor_input.reduce, anchor_input.maps) if isinstance(module, torch.nn.Linear)]
            self._anchor_input = [linear(ops, dtype, device, x, uneven=i == 0) for i, x in enumerate(products)]

    def num_rows(self, num_tokens: int) -> int:
        return self.config.block_size

    def feature_rows(self, start: int, last: int) -> tuple[int, int]:
        # The last position is read again for the block's inputs, even if it is projected already.
        return min(start, max(0, last - 1)) if self.config.anchor_input else start, last

    def begin(self, drafts: Sequence[DraftRows], features: Tensor, cache: KvCache) -> BegunStates:
        missing = [draft for draft in drafts if draft.start < draft.last]
        if missing:
            rows = [np.arange(draft.features, draft.features + draft.last - draft.start) for draft in missing]
            taken = features[to_device(np.concatenate(rows), features.device)]
            self.project([context_span(draft) for draft in missing], taken, cache)
        last = None
        if self._anchor_input:
            before = [draft.features + draft.last - draft.start - 1 if draft.last else 0 for draft in drafts]
            last = features[to_device(np.array(before), features.device)]
        blocks = [
            PackedSpan(draft.last, (draft.token_ids[draft.last - draft.start], *self._masks), draft.block_table)
            for draft in drafts
        ]
        return _Blocks(self, blocks, last, cache)

    @torch.inference_mode()
    def project(self, spans: Sequence[PackedSpan], features: Tensor, cache: KvCache) -> None:
        """Writes keys and values of the positions of ``spans`` (equations 2 and 3); ``features`` [rows, feature_size]."""
        layout = self.layouts.lay_out(spans, cache)
        projected = self._fc(features).float()
        context = self._context_ops.add_norm(projected, None, self._hidden_norm)
        parts = self._context_kv(context).unflatten(-1, (len(self._layers), -1)).transpose(0, 1).contiguous()
        for index, (layer, kv) in enumerate(zip(self._layers, parts, strict=True)):
            keys, values = cache.keys[index], cache.values[index]
            self._context_ops.rotate_and_store(kv, layer.parts.head_norms, layout, keys, values)

    @torch.inference_mode()
    def run(self, blocks: Sequence[PackedSpan], last_features: Tensor | None, cache: KvCache) -> Tensor:
        """h of ``blocks``, spans of ``block_size`` tokens (an anchor and masks): [blocks, block_size, d] in the dtype.

        ``last_features``: [blocks, feature_size] of the position before each anchor or zeros, for ``anchor_input``.
        """
        return self.run_laid_out(self.layouts.lay_out(blocks, cache), last_features, cache)

    @torch.inference_mode()
    def run_laid_out(self, layout: Layout, last_features: Tensor | None, cache: KvCache) -> Tensor:
        residual, delta = self._inputs(layout, last_features), None
        for index, (layer, attends) in enumerate(zip(self._layers, self._attending(layout, cache.block_len), strict=True)):
            delta = layer.run(layout, residual, delta, (cache.keys[index], cache.values[index]), attends=attends)
        return self._ops.add_norm(residual, delta, self._final_norm).unflatten(0, (layout.num_spans, -1))

    def _attending(self, layout: Layout, block_len: int) -> list[Layout]:
        """What the rows of each layer attend to."""
        anchors = layout.base_lens.repeat_interleave(self.config.block_size)
        ends = anchors + (self.config.block_size - 1)
        found = {
            (window, is_causal): attending(
                layout, layout.positions if is_causal else ends, None if window is None else anchors - window, block_len
            )
            for window, is_causal in set(self.config.attention)
        }
        return [found[one] for one in self.config.attention]

    def _inputs(self, layout: Layout, last_features: Tensor | None) -> Tensor:
        """fp32 [rows, d], which may be modified."""
        embedded = torch.nn.functional.embedding(layout.token_ids, self._embedding)
        if not self._anchor_input or last_features is None:
            return embedded.float()
        x = torch.cat([last_features, embedded[:: self.config.block_size].to(last_features.dtype)], dim=-1)
        for product in self._anchor_input:
            x = product(x)
        return embedded.float() + x.float().view(embedded.shape)


@dataclass(frozen=True, slots=True)
class _Blocks(BegunStates):
    """``States`` of blocks, computed when they are asked for."""

    stage: BlockStage
    blocks: Sequence[PackedSpan]
    last_features: Tensor | None
    cache: KvCache

    def known(self) -> Tensor:
        return self._predicting(self.stage.run(self.blocks, self.last_features, self.cache))

    def inputs(self, num_drafts: int, num_steps: int) -> StateInputs:
        num_more = num_drafts - len(self.blocks)
        host = self.stage.layouts.pack([*self.blocks, *repeat(self.blocks[-1], num_more)], self.cache)
        last = () if self.last_features is None else (repeat_last(self.last_features, num_more),)

        def states(parts: Sequence[Tensor]) -> KnownStates:
            buffer, *features = parts
            hidden = self.stage.run_laid_out(host.layout(buffer), features[0] if features else None, self.cache)
            return KnownStates(self._predicting(hidden))

        return StateInputs((host.buffer, *last), states)

    def _predicting(self, hidden: Tensor) -> Tensor:
        return hidden[:, self.stage.config.num_skipped :]
