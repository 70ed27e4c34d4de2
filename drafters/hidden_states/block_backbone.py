"""DSpark's parallel stage as served: fused weights, the engine's operators, a paged cache of projected features.

The reference is ``network.py``. The cache of each draft layer holds keys and values of the context, projected once, and
behind them those of the current block.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafters.hidden_states.block_network import DSparkLayer, DSparkNetwork
from engine.batch_layout import Layout, PackedSpan, lay_out
from engine.factory import make_ops
from engine.forward import DecoderLayer
from engine.kv_cache import KvCache
from engine.models.config import inverse_frequencies
from engine.models.weights import LinearWeight
from engine.ops import HeadNorms, LayerParts, Linear


class Backbone:
    """A drafter up to h, on one device. Not thread-safe. ``int8``: multiplies int8 weights, where the device supports it."""

    def __init__(self, network: DSparkNetwork, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> None:
        self.config = network.config
        self.dtype = dtype
        self.device = device
        shape = self.config.shape
        self._ops = make_ops(shape, dtype, device, int8=int8)
        # A context has keys and values, but no queries.
        self._context_ops = make_ops(replace(shape, num_heads=0), dtype, device)
        self._frequencies = torch.tensor(inverse_frequencies(shape))
        self._fc = self._linear(network.fc, uneven=True)
        self._hidden_norm = self._norm(network.hidden_norm)
        layers = [layer for layer in network.layers if isinstance(layer, DSparkLayer)]
        self._context_kv = self._linear(*(part for x in layers for part in (x.self_attn.k_proj, x.self_attn.v_proj)))
        self._layers = [self._layer(layer) for layer in layers]
        self._final_norm = self._norm(network.norm)
        self._embedding = network.embed_tokens.weight.detach().to(device)
        self._anchor_input: list[Linear] = []
        if (anchor_input := network.anchor_input) is not None:
            products = [module for module in (anchor_input.reduce, anchor_input.maps) if isinstance(module, torch.nn.Linear)]
            self._anchor_input = [self._linear(product, uneven=i == 0) for i, product in enumerate(products)]

    def new_cache(self, num_blocks: int) -> KvCache:
        return KvCache.allocate(self.config.shape, num_blocks, self.dtype, self.device)

    @torch.inference_mode()
    def project(self, spans: Sequence[PackedSpan], features: Tensor, cache: KvCache) -> None:
        """Writes keys and values of the positions of ``spans`` (equations 2 and 3); ``features`` [rows, feature_size]."""
        layout = lay_out(spans, cache.block_len, self._frequencies, self.device)
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
        layout = lay_out(blocks, cache.block_len, self._frequencies, self.device)
        whole = _each_row_at_the_end(layout, self.config.block_size)
        residual = self._inputs(layout, last_features)
        delta = None
        for index, layer in enumerate(self._layers):
            delta = layer.run(layout, residual, delta, (cache.keys[index], cache.values[index]), attends=whole)
        return self._ops.add_norm(residual, delta, self._final_norm).unflatten(0, (len(blocks), -1))

    def _inputs(self, layout: Layout, last_features: Tensor | None) -> Tensor:
        """fp32 [rows, d], which may be modified."""
        embedded = torch.nn.functional.embedding(layout.token_ids, self._embedding)
        if not self._anchor_input or last_features is None:
            return embedded.float()
        x = torch.cat([last_features, embedded[:: self.config.block_size].to(self.dtype)], dim=-1)
        for product in self._anchor_input:
            x = product(x)
        return embedded.float() + x.float().view(embedded.shape)

    def _layer(self, layer: DSparkLayer) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = self.config.shape.qk_norm
        norms = HeadNorms(self._norm(attention.q_norm), self._norm(attention.k_norm)) if has_norms else None
        parts = LayerParts(
            input_norm=self._norm(layer.input_layernorm),
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms=norms,
            out=self._linear(attention.o_proj),
            post_norm=self._norm(layer.post_attention_layernorm),
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj),
            down=self._linear(mlp.down_proj),
        )
        return DecoderLayer(self._ops, parts)

    def _linear(self, *parts: torch.nn.Linear, uneven: bool = False) -> Linear:
        """Fuses products of one input. ``uneven``: the input is raw hidden states of the target."""
        weight = torch.cat([part.weight.detach() for part in parts]).to(self.device, self.dtype)
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        bias = torch.cat(biases).to(self.device, self.dtype) if biases else None
        return self._ops.linear(LinearWeight(weight, bias, uneven))

    def _norm(self, norm: torch.nn.Module) -> Tensor:
        return norm.get_parameter("weight").detach().float().to(self.device)


def _each_row_at_the_end(layout: Layout, block_size: int) -> Layout:
    """The layout of whole blocks in which every row is a span of its own at its block's last position."""
    ends = layout.base_lens.repeat_interleave(block_size) + (block_size - 1)
    starts = torch.arange(layout.num_rows + 1, dtype=torch.int32, device=ends.device)
    tables = layout.tables.repeat_interleave(block_size, dim=0)
    return replace(layout, starts=starts, base_lens=ends, positions=ends, tables=tables, max_span_len=1)
