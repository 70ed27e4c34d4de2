"""The operators of a forward pass: the protocol, and the plain torch reference that others are tested against."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.batch_layout import Layout
from engine.cpu.packed import packed_linear
from engine.models.config import DecoderConfig
from engine.models.weights import LinearWeight

if TYPE_CHECKING:
    from engine.sampling import SampleSpan

Linear = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out]


class Logits(Protocol):
    """The product with an output head: [rows, in] -> fp32 [rows, out], added to ``base`` (fp32, possibly strided rows)."""

    def __call__(self, x: torch.Tensor, base: torch.Tensor | None = None, /) -> torch.Tensor: ...


def plain_logits(linear: Linear) -> Logits:
    def logits(x: torch.Tensor, base: torch.Tensor | None = None, /) -> torch.Tensor:
        product = linear(x).float()
        return product if base is None else product + base

    return logits


class GumbelArgmax(Protocol):
    """Chooses one token per row: argmax_v(z_v / T + G(key, v)), the lowest id of equal ones."""

    def __call__(
        self,
        logits: torch.Tensor,
        keys: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        floors: NDArray[np.float32] | None = None,
        margins: NDArray[np.float32] | None = None,
        /,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The token and the largest logit of each row. Where that logit is not finite (NaN if any is), the token is void.

        Args:
            logits: [rows, columns] in the dtype of the operators or fp32; each row contiguous.
            keys: of the noise, [rows]; ``engine.noise.noise_keys``.
            temperatures: [rows]; 0 takes the most probable token.
            floors: [rows], the least (z - max z) / T that may be chosen.
            margins: [rows], contiguous: filled with the score of the token less that of the next best.
        """


@dataclass(frozen=True, slots=True)
class RowChoices:
    """Of each row, (R,); void where the largest logit is not finite."""

    token_ids: NDArray[np.int64]
    highest: NDArray[np.float64]  # logit after the edits
    confidences: NDArray[np.float64]  # probability of the token, with temperature 1 for greedy rows; void unless wanted
    logits: NDArray[np.float64]  # the token's, after the edits
    margins: NDArray[np.float64]  # void unless wanted


@runtime_checkable
class FusedSampling(GumbelArgmax, Protocol):
    """A choice that also edits and filters, on the device of the logits."""

    def choose(
        self,
        logits: torch.Tensor,
        members: Sequence["SampleSpan"],
        keys: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        *,
        want_confidences: bool,
    ) -> RowChoices:
        """One token per row by the rule of ``engine.sampling``. ``logits`` [rows, columns or more] is not modified."""

    def records(self, keys: NDArray[np.int64], temperatures: NDArray[np.float32]) -> NDArray[np.int64]:
        """What ``choose_records`` needs to know of rows without filters or edits, [rows, words]."""

    def choose_records(self, logits: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """As ``choose``, on the device: fp64 [rows, 5], the fields of ``RowChoices``. Nothing is copied or waited for."""

    def warm_up(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compiles what logits of ``dtype`` need. Else the first choice does, which takes seconds."""


Recordable = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


class Graphs(Protocol):
    """Computations on a device that are recorded once, and replayed by one launch. Not thread-safe."""

    @property
    def sizes(self) -> Sequence[int]:
        """Of the batches that are recorded, ascending."""

    def padded(self, num: int) -> int | None:
        """The next size of a batch that is recorded. None: it is too large."""

    def capture(self, key: Hashable, inputs: Sequence[torch.Tensor], compute: Recordable, /) -> object:
        """Records ``compute`` in the lane of the calling thread, unless it has been, so that no ``run`` has to. Raises
        RuntimeError: the device refuses."""

    def run(self, key: Hashable, inputs: Sequence[torch.Tensor], compute: Recordable, /) -> tuple[torch.Tensor, ...]:
        """``compute`` of ``inputs``, which are copied to the device; the next call overwrites what is returned. Calls of one
        ``key`` compute the same, of other values of the same shapes; copies and waits are not recorded."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms over each head of queries and keys (Qwen3), fp32 [head_dim]."""

    q: torch.Tensor
    k: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Fused products of one decoder layer; norms are fp32."""

    input_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def products(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In the order of a pass."""
        return self.qkv, self.out, self.gate_up, self.down


class WholeLayer(Protocol):
    """A layer as one operator: ``engine.forward.DecoderLayer.run``."""

    def __call__(
        self,
        layout: Layout,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        kv: tuple[torch.Tensor, torch.Tensor],
        attends: Layout,
        /,
    ) -> torch.Tensor: ...


class Ops(Protocol):
    """Operators on one device for one model shape and dtype. The residual stream is fp32, products are in the dtype. Not
    thread-safe; a returned tensor may be overwritten by the next call of the same operator."""

    def linear(self, weight: LinearWeight) -> Linear:
        """The product with ``weight``, whose layout may change: keep no other reference to it."""

    def logits(self, weight: LinearWeight) -> Logits:
        """As ``linear``, for an output head."""

    def gumbel_argmax(self, token_ids: NDArray[np.int64]) -> GumbelArgmax | None:
        """A kernel that chooses among logits of ``token_ids``, ascending. None: plain torch chooses."""

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """``residual`` [rows, hidden] += delta, in place; returns its RMS norm (arXiv 1910.07467) in the dtype."""

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: HeadNorms | None, layout: Layout, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Rotates queries and keys, writes keys and values of all rows to the cache of one layer. Returns the queries,
        scaled by head_dim ** -0.5, [rows, heads, head_dim]."""

    def attention(self, queries: torch.Tensor, layout: Layout, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal grouped-query attention of all rows to the cache of one layer: [rows, heads * head_dim]."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [rows, intermediate], of [rows, 2 * intermediate]."""

    def whole_layer(self, parts: LayerParts) -> WholeLayer | None:
        """All operators of a layer in one call, with the same results. None: they are called one by one, as where a subclass
        replaces one."""


class TorchOps:
    """The reference on any device. Slow: attention loops over spans."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._scale = 1.0 / math.sqrt(config.head_dim)

    def linear(self, weight: LinearWeight) -> Linear:
        dense = weight.dense
        if dense.device.type == "cpu":
            return packed_linear(LinearWeight(dense, weight.bias))
        return lambda x: F.linear(x, dense, weight.bias)

    def logits(self, weight: LinearWeight) -> Logits:
        return plain_logits(self.linear(weight))

    def gumbel_argmax(self, token_ids: NDArray[np.int64]) -> None:
        return None

    def whole_layer(self, parts: LayerParts) -> None:
        return None

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if delta is not None:
            residual += delta
        return self._norm(residual, weight).to(self._dtype)

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: HeadNorms | None, layout: Layout, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        c = self._config
        q, k, v = qkv.float().split([c.q_size, c.kv_size, c.kv_size], dim=-1)
        q = q.view(len(q), c.num_heads, c.head_dim)  # DSpark projects its context without query heads
        k = k.view(-1, c.num_kv_heads, c.head_dim)
        if norms is not None:
            q, k = self._norm(q, norms.q), self._norm(k, norms.k)
        q, k = _rotate(q, layout), _rotate(k, layout)
        block_len = keys.shape[3]
        blocks, offsets = layout.slots // block_len, layout.slots % block_len
        keys[blocks, :, :, offsets] = k.to(keys.dtype)
        values[blocks, :, offsets] = v.view(-1, c.num_kv_heads, c.head_dim).to(values.dtype)
        return q * self._scale

    def attention(self, queries: torch.Tensor, layout: Layout, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        c = self._config
        block_len = keys.shape[3]
        out = queries.new_empty(queries.shape[0], c.q_size, dtype=self._dtype)
        starts = layout.starts.tolist()
        for i, base_len in enumerate(layout.base_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            positions = layout.positions[rows]
            total_len = base_len + len(positions)
            table = layout.tables[i, : -(-total_len // block_len)].long()
            k = keys[table].permute(1, 2, 0, 3).flatten(2)[:, :, :total_len].float()  # [kv_heads, head_dim, total]
            v = values[table].transpose(0, 1).flatten(1, 2)[:, :total_len].float()  # [kv_heads, total, head_dim]
            q = queries[rows].view(-1, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
            scores = torch.einsum("rhgd,hdt->rhgt", q, k)
            later = torch.arange(total_len, device=positions.device) > positions[:, None]
            probabilities = scores.masked_fill(later[:, None, None], -math.inf).softmax(-1)
            out[rows] = torch.einsum("rhgt,htd->rhgd", probabilities, v).flatten(1).to(self._dtype)
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(self._dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.norm_eps)


def _rotate(heads: torch.Tensor, layout: Layout) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = layout.cos[:, None], layout.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
