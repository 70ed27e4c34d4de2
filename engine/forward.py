"""The forward pass over spans of different sequences and lengths, packed into one batch of rows. Prefill and decode are not
distinguished."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from engine.batch_layout import Layout, PackedSpan, StayingRows, lay_out
from engine.device import synchronize
from engine.kv_cache import BLOCK_LEN, KvCache
from engine.loop_status import PASSES
from engine.models.config import DecoderConfig, inverse_frequencies
from engine.models.quantised import QuantisedMatrix
from engine.models.weights import LayerWeights, LinearWeight, Weights
from engine.ops import HeadNorms, LayerParts, Linear, Ops
from engine.tensor_parallel.ranks import ModelRanks

__all__ = ["CausalModel", "PackedSpan", "PassStates"]


class PassStates(NamedTuple):
    """Hidden states of the rows of a pass, in the order of its spans, in the dtype."""

    final: torch.Tensor  # after the final norm, [rows, hidden]
    features: torch.Tensor  # after the layers that were asked for, [rows, layers * hidden]
    slots: torch.Tensor  # of the rows in the KV cache, int64 [rows]


class RowWatch(Protocol):
    """Looks at the rows of one pass between its layers, and may let the last ones of spans leave (early exit)."""

    @property
    def depths(self) -> Collection[int]:
        """It is asked when so many layers are computed; at all of them, after the final norm."""

    def look(self, depth: int, residual: torch.Tensor, delta: torch.Tensor | None) -> StayingRows | None:
        """The hidden states are ``residual`` + ``delta``, [rows, hidden]; not to be modified. None: all rows stay."""


class DecoderLayer:
    """One layer, by the operators of its device. ``is_plain``: its qkv reads its input's norm alone."""

    def __init__(self, ops: Ops, parts: LayerParts, *, is_plain: bool = True) -> None:
        self.parts = parts
        self._ops = ops
        self._whole = ops.whole_layer(parts) if is_plain else None

    def run(
        self,
        layout: Layout,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        kv: tuple[torch.Tensor, torch.Tensor],
        attends: Layout,
    ) -> torch.Tensor:
        """Adds ``delta`` and the attention to ``residual`` in place. Returns the feed-forward output, still to be added.
        ``kv``: keys and values of the layer's cache. ``attends``: the layout of the attention."""
        if self._whole is not None:
            return self._whole(layout, residual, delta, kv, attends)
        normed = self._ops.add_norm(residual, delta, self.parts.input_norm)
        return self.run_behind_norm(layout, normed, residual, kv, attends)

    def run_behind_norm(
        self,
        layout: Layout,
        normed: torch.Tensor,
        residual: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        attends: Layout,
    ) -> torch.Tensor:
        """As ``run`` with the input of the qkv product given."""
        ops, parts = self._ops, self.parts
        qkv = parts.qkv(normed)
        queries = ops.rotate_and_store(qkv, parts.head_norms, layout, *kv)
        attended = parts.out(ops.attention(queries, attends, *kv))
        return parts.down(ops.gate(parts.gate_up(ops.add_norm(residual, attended, parts.post_norm))))


class CausalModel:
    """A decoder of the Llama family over a paged KV cache. Immutable; not thread-safe, since its operators own buffers.

    Args:
        config: shape of the whole model.
        weights, ops: of the rank's shard, if the model is one rank of several.
        dtype: of weights, products and KV cache; of quantised weights, whose KV cache is bfloat16, of products.
        ranks: computes sums over the ranks; they make the same passes in step.
    """

    padded_rows: ClassVar[tuple[int, ...]] = ()  # a smaller pass is padded to the next of these; ascending

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | None = None,
        ranks: ModelRanks | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self._ops = ops
        self._inverse_frequencies = torch.tensor(inverse_frequencies(config), dtype=torch.float32)
        table = weights.embedding()
        is_quantised = isinstance(table, QuantisedMatrix)
        self.kv_dtype = torch.bfloat16 if is_quantised else dtype  # of KV cache and features
        self._table = table if isinstance(table, QuantisedMatrix) else table.to(self.device)
        self._layers = [self._prepare(layer) for layer in weights.layers()]
        self._final_norm = weights.final_norm().to(self.device)
        head = weights.head()
        if head is table or isinstance(head, QuantisedMatrix):
            self._head = ops.linear(LinearWeight(self._table if head is table else head))
        else:
            self._head = ops.linear(LinearWeight(head.to(self.device)))

    @property
    def ops(self) -> Ops:
        return self._ops

    @cached_property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden], in the dtype or a narrower one; of one rank, its shard. Of a quantised table a copy."""
        table = self._table
        return table.dequantised().to(self.kv_dtype) if isinstance(table, QuantisedMatrix) else table

    @property
    def layer_products(self) -> list[tuple[Linear, Linear, Linear, Linear]]:
        """Linear products of each layer, in the order of a pass: qkv, out, gate_up, down."""
        return [layer.parts.products for layer in self._layers]

    def new_cache(self, num_blocks: int, block_len: int = BLOCK_LEN) -> KvCache:
        config = self.config if self.ranks is None else self.ranks.shard.config_of(self.config)
        return KvCache.allocate(config, num_blocks, self.kv_dtype, self.device, block_len)

    def warm_up(self, cache: KvCache) -> None:
        """Prepares small passes over ``cache``; does nothing on a CPU."""

    def synchronize(self) -> None:
        """Waits until the device has computed every pass so far."""
        synchronize(self.device)

    @torch.inference_mode()
    def forward(self, spans: Sequence[PackedSpan], cache: KvCache) -> torch.Tensor:
        """Computes all spans and writes their keys and values to ``cache``. Two spans of a pass may share only blocks that
        lie wholly before both base_lens.

        Returns the final hidden states, [rows, hidden] in the dtype, rows in the order of the spans.
        """
        return self.forward_with_hidden_states(spans, cache, ()).final

    @torch.inference_mode()
    def forward_with_hidden_states(self, spans: Sequence[PackedSpan], cache: KvCache, layers: tuple[int, ...]) -> PassStates:
        """As ``forward``, with the hidden states after ``layers``, which ascend: -1 is the embedding, i is transformers'
        ``hidden_states[i + 1]``, so the last layer's is taken after the final norm."""
        return self._pass(self.lay_out(spans, cache.block_len), cache, layers)

    @torch.inference_mode()
    def forward_watched(
        self, spans: Sequence[PackedSpan], cache: KvCache, layers: tuple[int, ...], watch: RowWatch
    ) -> PassStates:
        """As ``forward_with_hidden_states``, of the rows that ``watch`` lets stay to the end. The keys and values of the
        others are written to the layers that they reached."""
        return self._pass(self.lay_out(spans, cache.block_len), cache, layers, watch)

    def _pass(self, layout: Layout, cache: KvCache, layers: tuple[int, ...], watch: RowWatch | None = None) -> PassStates:
        residual = self._embed(layout.token_ids).float()  # fp32; a layer's output is residual + delta
        delta: torch.Tensor | None = None
        num_rows, size = residual.shape
        kept = residual.new_empty(num_rows, len(layers), size, dtype=self.kv_dtype)
        num_kept = 0
        if -1 in layers:
            kept[:, 0] = residual
            num_kept = 1
        for index, layer in enumerate(self._layers):
            PASSES.advanced()
            kv = cache.keys[index], cache.values[index]
            delta = layer.run(layout, residual, delta, kv, attends=layout)
            if index in layers and index + 1 < len(self._layers):
                torch.add(residual, delta, out=kept[:, num_kept])
                num_kept += 1
            if watch is None or index + 1 == len(self._layers) or index + 1 not in watch.depths:
                continue
            staying = watch.look(index + 1, residual, delta)
            if staying is not None:
                layout, kept = layout.keep(staying), kept[staying.rows]
                residual, delta = residual[staying.rows], delta[staying.rows]
        PASSES.advanced()
        hidden, slots = self._ops.add_norm(residual, delta, self._final_norm), layout.slots
        if watch is not None and len(self._layers) in watch.depths:
            staying = watch.look(len(self._layers), hidden, None)
            if staying is not None:
                hidden, slots, kept = hidden[staying.rows], slots[staying.rows], kept[staying.rows]
        if num_kept < len(layers):
            kept[:, num_kept] = hidden
        return PassStates(hidden, kept.flatten(1), slots)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head applied to rows of final hidden states: [n, hidden] -> [n, vocab], in the dtype; of one rank, the columns
        of its shard."""
        return self._head(hidden)

    def lay_out(self, spans: Sequence[PackedSpan], block_len: int) -> Layout:
        return lay_out(spans, block_len, self._inverse_frequencies, self.device)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.ranks is None:
            return self._rows(token_ids)
        own = self.ranks.shard.token_ids
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        rows = self._rows(torch.where(is_own, token_ids - own.start, 0))
        return self.ranks.group.all_reduce(rows * is_own[:, None])

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self._table
        return table.rows(token_ids) if isinstance(table, QuantisedMatrix) else F.embedding(token_ids, table)

    def _prepare(self, layer: LayerWeights) -> DecoderLayer:
        def linear(weight: LinearWeight) -> Linear:
            bias = None if weight.bias is None else weight.bias.to(self.device)
            matrix = weight.weight
            held = matrix if isinstance(matrix, QuantisedMatrix) else matrix.to(self.device)
            return self._ops.linear(LinearWeight(held, bias))

        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm.to(self.device), layer.k_norm.to(self.device))
        input_norm, post_norm = layer.input_norm.to(self.device), layer.post_norm.to(self.device)
        qkv, out, gate_up, down = (linear(weight) for weight in (layer.qkv, layer.out, layer.gate_up, layer.down))
        if self.ranks is not None:
            out, down = self.ranks.summed(out), self.ranks.summed(down)
        return DecoderLayer(self._ops, LayerParts(input_norm, qkv, norms, out, post_norm, gate_up, down))
