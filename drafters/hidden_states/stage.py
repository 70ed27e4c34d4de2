"""The part of a drafter that computes states from features, as served: one implementation for blocks, one for EAGLE."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.config import NetworkConfig
from drafters.hidden_states.eagle_network import EagleNetwork
from drafters.hidden_states.modules import Attention, Mlp
from engine.batch_layout import HostLayout, Layout, PackedSpan, lay_out, pack
from engine.factory import make_ops
from engine.forward import DecoderLayer
from engine.kv_cache import KvCache
from engine.models.config import DecoderConfig, inverse_frequencies
from engine.models.weights import LinearWeight
from engine.ops import HeadNorms, LayerParts, Linear, Ops


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What a draft of one request computes: rows ``start`` .. ``last`` - 1 of its context, which its cache keeps, and the
    rows of the draft behind them, which are computed anew for each.

    ``token_ids``: committed, of the rows from ``start`` on. ``num_rows``: of the draft. ``features``: where those of row
    ``start`` lie among the features of the pass, followed by those of later rows; a block's may lack the last one.
    """

    start: int
    last: int
    token_ids: Sequence[int]
    num_rows: int
    features: int
    block_table: NDArray[np.int32]


class States(Protocol):
    """States of the rows that predict the tokens of drafts, after the final norm."""

    def known(self) -> Tensor | None:
        """[drafts, tokens, d]; None: each depends on the tokens before, and comes by ``step``."""
        return None

    def step(self, k: int, live: Sequence[int], token_ids: Tensor) -> Tensor:
        """[live, d] of token ``k`` of the drafts ``live``, called for k = 0, 1, ... ``token_ids``: int64 [live], the tokens
        before it. Not of known states."""
        raise AssertionError("known states have no steps")


class BegunStates(States, Protocol):
    def inputs(self, num_drafts: int, num_steps: int) -> "StateInputs":
        """Of at least as many drafts, the last of which is repeated, and steps."""


@dataclass(frozen=True, slots=True)
class StateInputs:
    """What states are computed from, and how, also from other values of the same shapes: without copies or waits."""

    parts: tuple[Tensor, ...]
    states: Callable[[Sequence[Tensor]], States]


class Stage(Protocol):
    """On one device. Not thread-safe."""

    shift: ClassVar[int]  # the token of a row stands so many positions behind it

    @property
    def config(self) -> NetworkConfig: ...

    @property
    def placement(self) -> tuple[torch.dtype, torch.device]: ...

    @property
    def max_len(self) -> int:
        """Tokens of a draft."""

    def num_rows(self, num_tokens: int) -> int:
        """Rows of the cache that a draft of so many tokens needs."""

    def feature_rows(self, start: int, last: int) -> tuple[int, int]:
        """First and end of the positions whose features are read."""

    def begin(self, drafts: Sequence[DraftRows], features: Tensor, cache: KvCache) -> BegunStates:
        """Computes what is missing of the contexts, and the first states. ``features`` [rows, feature_size], row 0 zeros."""


@dataclass(frozen=True, slots=True)
class KnownStates(States):
    """``States`` that depend on no draft token."""

    hidden: Tensor

    def known(self) -> Tensor:
        return self.hidden

    def inputs(self, num_drafts: int, num_steps: int) -> StateInputs:
        drafts, steps = (torch.arange(num, device=self.hidden.device) for num in (num_drafts, num_steps))
        num, most = self.hidden.shape[:2]
        hidden = self.hidden[drafts.clamp_max(num - 1)[:, None], steps.clamp_max(most - 1)]
        return StateInputs((hidden,), lambda parts: KnownStates(parts[0]))


class FusedStage:
    """The set-up that stages share."""

    def __init__(
        self, network: BlockNetwork | EagleNetwork, dtype: torch.dtype, device: torch.device, *, int8: bool = False
    ) -> None:
        shape = network.config.shape
        self.placement = dtype, device
        self.layouts = Layouts(shape, device)
        self._ops = make_ops(shape, dtype, device, int8=int8)
        self._fc = linear(self._ops, dtype, device, network.fc, uneven=True)
        self._final_norm = norm_weight(network.norm, device)
        self._embedding = network.embed_tokens.weight.detach().to(device)


def repeat_last(rows: Tensor, num_more: int) -> Tensor:
    """[rows + num_more, ...]"""
    return torch.cat([rows, rows[-1:].expand(num_more, *rows.shape[1:])])


class Layouts:
    """Of the passes of a stage."""

    def __init__(self, shape: DecoderConfig, device: torch.device) -> None:
        self._max_len, self._device = shape.max_len, device
        self._frequencies = torch.tensor(inverse_frequencies(shape))

    def lay_out(self, spans: Sequence[PackedSpan], cache: KvCache) -> Layout:
        return lay_out(spans, cache.block_len, self._frequencies, self._device)

    def pack(self, spans: Sequence[PackedSpan], cache: KvCache) -> HostLayout:
        """With block tables that hold any sequence."""
        width = min(cache.num_blocks, -(-self._max_len // cache.block_len))
        return pack(spans, cache.block_len, self._frequencies, self._device, table_width=width)


def attending(layout: Layout, ends: Tensor, first: Tensor | None, block_len: int) -> Layout:
    """The layout with every row as a span of its own that attends to positions up to ``ends``, [rows].

    ``first``: [rows], the first of them; None: 0. It is rounded down to a whole block of the cache.
    """
    num_rows, device = layout.num_rows, ends.device
    spans = layout.starts.diff()
    tables = layout.tables.repeat_interleave(spans, dim=0, output_size=num_rows)
    if first is not None:
        skipped = first.clamp_min(0) // block_len
        columns = torch.arange(tables.shape[1], device=device) + skipped[:, None]
        tables = tables.gather(1, columns.clamp_max(tables.shape[1] - 1).long())
        ends = ends - skipped * block_len
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    return replace(
        layout, starts=starts, base_lens=ends.int(), positions=ends.long(), tables=tables.contiguous(), max_span_len=1
    )


def linear(ops: Ops, kind: torch.dtype, device: torch.device, *parts: nn.Linear, uneven: bool = False) -> Linear:
    """Fuses products of one input. ``uneven``: the input is raw hidden states of the target."""
    weight = torch.cat([part.weight.detach() for part in parts]).to(device, kind)
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    return ops.linear(LinearWeight(weight, torch.cat(biases).to(device, kind) if biases else None, uneven))


def norm_weight(norm: nn.Module, device: torch.device) -> Tensor:
    return norm.get_parameter("weight").detach().float().to(device)


def decoder_layer(
    ops: Ops, kind: torch.dtype, device: torch.device, layer: nn.Module, *, is_plain: bool = True
) -> DecoderLayer:
    """Of a layer with Hugging Face's names."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    has_norms = not isinstance(attention.q_norm, nn.Identity)
    norms = HeadNorms(norm_weight(attention.q_norm, device), norm_weight(attention.k_norm, device)) if has_norms else None
    parts = LayerParts(
        input_norm=norm_weight(layer.get_submodule("input_layernorm"), device),
        qkv=linear(ops, kind, device, attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        out=linear(ops, kind, device, attention.o_proj),
        post_norm=norm_weight(layer.get_submodule("post_attention_layernorm"), device),
        gate_up=linear(ops, kind, device, mlp.gate_proj, mlp.up_proj),
        down=linear(ops, kind, device, mlp.down_proj),
    )
    return DecoderLayer(ops, parts, is_plain=is_plain)


def context_span(draft: DraftRows) -> PackedSpan:
    return PackedSpan(draft.start, draft.token_ids[: draft.last - draft.start], draft.block_table)
