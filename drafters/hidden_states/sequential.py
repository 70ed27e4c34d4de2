"""The sequential stage as served: the tokens of all blocks side by side, position after position."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from cluster.types import MAX_DRAFT_LEN
from drafters.hidden_states.block_network import BlockNetwork, markov_rows
from drafters.hidden_states.device_round import DeviceRound, Given
from drafters.hidden_states.families import Network
from drafters.hidden_states.stage import BegunStates
from drafters.reduced_vocab import ReducedHead
from engine.cpu.packed import product_dtype
from engine.device import to_device
from engine.factory import make_graphs, make_ops
from engine.models.weights import LinearWeight
from engine.noise import gumbel, noise_keys
from engine.ops import FusedSampling, GumbelArgmax, Logits
from engine.sampling import Chosen, Sampler, SampleSpan, SamplingState
from profiler.calibration import TemperatureScaling

# Tokens of rows: fp32 logits [rows, n], noise keys [rows], temperatures fp32 [rows].
Choice = Callable[[Tensor, NDArray[np.int64], NDArray[np.float32]], tuple[list[int], list[float]]]  # and their margins

_NUM_CANDIDATES = 64  # of a choice without a kernel
_CPU_ROWS = 12  # of a head's product: fewer cost more per row, more do not cost less
_UNSCALED = TemperatureScaling()
_MIN_CONFIDENCE = 1e-6  # confidences lie between this and 1 - this
_MAX_MARGIN = 1e3  # where no other token can be chosen it is infinite


@dataclass(slots=True)
class Block:
    anchor: int  # token
    state: SamplingState
    ahead: tuple[int, ...]  # tokens given for its first positions
    num_tokens: int  # to be drafted behind them, at most
    stop_ids: frozenset[int]
    scaling: TemperatureScaling = _UNSCALED  # of the confidences before a token is chosen, by position
    margin_scaling: TemperatureScaling | None = None  # of those behind a choice by shared noise alone
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    survival: float = 1.0  # of all tokens so far
    done: bool = False
    least_survival: float = 0.0  # below it no token is added to the first

    @property
    def end(self) -> int:
        """Positions that are needed, given ones included."""
        return len(self.ahead) + self.num_tokens

    def wants(self, k: int) -> bool:
        return not self.done and len(self.ahead) <= k < self.end

    def previous_token(self, k: int) -> int:
        """The token before the one that position ``k`` predicts; any token if the block is done."""
        if k == 0:
            return self.anchor
        if k <= len(self.ahead):
            return self.ahead[k - 1]
        return self.token_ids[min(k - len(self.ahead), len(self.token_ids)) - 1] if self.token_ids else self.anchor

    def add(self, token_id: int, confidence: float) -> None:
        self.token_ids.append(token_id)
        self.confidences.append(confidence)
        self.survival *= confidence
        self.done = token_id in self.stop_ids


class SequentialStage:
    """Head, sequential head and confidence head, on one device.

    Args:
        min_survival: a draft ends before a token whose prefix is less probable than this.
        int8: multiplies int8 weights, where the device supports it.
    """

    def __init__(
        self,
        network: Network,
        dtype: torch.dtype,
        device: torch.device,
        sampler: Sampler,
        min_survival: float = 0.0,
        *,
        int8: bool = False,
    ) -> None:
        config = network.config
        ops = make_ops(config.shape, dtype, device, int8=int8)
        self._device, self._draft_len = device, config.draft_len
        self._sampler = sampler
        self._min_survival = min_survival
        self._head = ops.logits(LinearWeight(network.lm_head.weight.detach().to(device, dtype)))
        self._rows_at_once = _CPU_ROWS if device.type == "cpu" else None
        self._markov = self._bias = self._confidence = None
        self._rows = np.zeros(0, np.int64)
        if isinstance(network, BlockNetwork):
            self._rows = markov_rows(network.config).numpy()
            self._markov = network.markov_head
            self._confidence = None if network.confidence_head is None else _Confidence(network, device)
        if self._markov is not None:
            self._markov = self._markov.to(device, product_dtype(dtype, device))
            self._bias = ops.logits(LinearWeight(self._markov.markov_w2.weight.detach().to(dtype)))
        known = range(config.shape.vocab_size) if config.draft_token_ids is None else config.draft_token_ids
        token_ids = np.array(known, np.int64)
        kernel = ops.gumbel_argmax(token_ids)
        self._choose = _make_choice(kernel, token_ids, device)
        self._on_device: DeviceRound | None = None
        self._recorded_len = MAX_DRAFT_LEN
        if isinstance(kernel, FusedSampling):
            rows, confidence = to_device(self._rows, device), self._confidence
            of_hidden = None if confidence is None else confidence.on_device
            of_row = None if confidence is None else confidence.of_row_on_device
            self._on_device = DeviceRound(
                self._head, kernel, self._markov, self._bias, rows, of_hidden, of_row, make_graphs(device)
            )
        self._sample_rows: Callable[[Tensor, Sequence[SampleSpan]], list[Chosen]]
        self._sample_rows = partial(sampler.choose, want_confidences=True)
        if config.draft_token_ids is not None:
            ids = torch.from_numpy(token_ids).to(device)
            self._sample_rows = ReducedHead(ids, config.shape.vocab_size, sampler, kernel).choose

    def record(self, begin: Callable[[], BegunStates], max_len: int) -> None:
        """As ``DeviceRound.record``, where rounds are replayed."""
        if self._on_device is not None:
            self._on_device.record(begin, max_len, self._draft_len)
            self._recorded_len = max_len

    @torch.inference_mode()
    def draft(self, states: BegunStates, blocks: Sequence[Block]) -> None:
        """``states``: of as many tokens as the blocks need, in the dtype."""
        num_steps = max(block.end for block in blocks)
        if self._on_device is not None and all(block.state.is_plain for block in blocks):
            self._draft_on_device(self._on_device, states, blocks, num_steps)
            return
        hidden = states.known()
        if hidden is not None:
            hidden = hidden[:, :num_steps].contiguous()
        base = _BaseLogits(self._head, hidden, blocks, self._rows_at_once)
        of_hidden = None if self._confidence is None or hidden is None else self._confidence.of_hidden(hidden)
        keys, temperatures = _noise(blocks, num_steps)
        is_fast = of_hidden is not None and all(block.state.is_plain for block in blocks)
        state: Tensor | None = None
        for k in range(num_steps):
            previous = np.array([block.previous_token(k) for block in blocks])
            if hidden is None:
                live = [i for i, block in enumerate(blocks) if not block.done and k < block.end]
                if not live:
                    return
                base.give(k, states.step(k, live, to_device(previous[live], self._device)), live)
            rows, latents = previous, None
            if self._markov is not None and hidden is not None:
                rows = self._rows[previous]
                embeddings = embedding(to_device(rows, self._device), self._markov.markov_w1.weight)
                latents, state = self._markov.step(embeddings, hidden[:, k].to(embeddings.dtype), state)
                latents = latents.to(hidden.dtype)
            confidences: Sequence[float | None] = [None] * len(blocks)
            own: Sequence[float] = ()
            if self._confidence is not None and of_hidden is not None:
                own = self._confidence.of_step(of_hidden[k], rows)
                confidences = [_scaled(logit, block.scaling, k) for logit, block in zip(own, blocks, strict=True)]
            for block, confidence in zip(blocks, confidences, strict=True):
                block.done |= confidence is not None and block.wants(k) and self._ends(block, confidence)
            active = [i for i, block in enumerate(blocks) if block.wants(k)]
            if not active:
                if all(block.done or block.end <= k for block in blocks):
                    return
                continue
            logits = self._logits(base.at(k, active), latents, active)
            if is_fast:
                token_ids, margins = self._choose(logits, keys[active, k], temperatures[active])
                for i, token_id, margin in zip(active, token_ids, margins, strict=True):
                    scaling = blocks[i].margin_scaling
                    known = confidences[i] if scaling is None else _scaled(own[i], scaling, k, margin)
                    blocks[i].add(token_id, known or _MIN_CONFIDENCE)
            else:
                self._sample(logits, [(blocks[i], confidences[i]) for i in active])

    def _draft_on_device(self, on_device: DeviceRound, states: BegunStates, blocks: Sequence[Block], num_steps: int) -> None:
        size = on_device.padded(len(blocks), num_steps, self._draft_len, self._recorded_len)
        num_drafts, num_steps = size or (len(blocks), num_steps)
        padded = [*blocks, *repeat(blocks[-1], num_drafts - len(blocks))]
        keys, temperatures = _noise(padded, num_steps)
        records = on_device.kernel.records(keys.T.ravel(), np.tile(temperatures, num_steps))
        given = Given.of(
            [block.anchor for block in padded], [block.ahead for block in padded], records.reshape(num_steps, num_drafts, -1)
        )
        for k, of_step in enumerate(on_device.run(states, given, size is not None)):
            for block, (token, highest, probability, _, margin, *logit) in zip(blocks, of_step.tolist(), strict=False):
                if not block.wants(k):
                    continue
                known = _scaled(logit[0], block.scaling, k) if logit else probability
                block.done = not math.isfinite(highest) or self._ends(block, known)
                if not block.done:
                    if logit and block.margin_scaling is not None:
                        known = _scaled(logit[0], block.margin_scaling, k, margin)
                    block.add(int(token), max(known, _MIN_CONFIDENCE))

    def _ends(self, block: Block, confidence: float) -> bool:
        """Whether the draft ends before a token of so much confidence."""
        least = max(self._min_survival, block.least_survival) if block.token_ids else self._min_survival
        return block.survival * confidence < least

    def _logits(self, base: Tensor, latents: Tensor | None, active: Sequence[int]) -> Tensor:
        """Of the active blocks, fp32, contiguous. ``base``: theirs; ``latents``: of all blocks."""
        if latents is None or self._bias is None:
            return base.contiguous()
        if len(active) < len(latents):
            latents = latents[to_device(np.array(active), self._device)]
        return self._bias(latents, base)

    def _sample(self, logits: Tensor, active: Sequence[tuple[Block, float | None]]) -> None:
        """One token for each block by the engine's sampler. Without a confidence the token's probability is taken."""
        spans = [SampleSpan(block.state, (*block.ahead, *block.token_ids), 1) for block, _ in active]
        all_chosen = self._sample_rows(logits, spans)
        for (block, confidence), chosen in zip(active, all_chosen, strict=True):
            if not chosen.token_ids:  # every token is masked, for the target too
                block.done = True
                continue
            known = chosen.confidences[0] if confidence is None else confidence
            if self._ends(block, known):
                block.done = True
            else:
                block.add(chosen.token_ids[0], max(known, _MIN_CONFIDENCE))


class _BaseLogits:
    """The head's logits, computed on demand: most blocks end before their last position.

    Args:
        hidden: [blocks, positions, d]; None: they are given position by position.
        rows_at_once: least rows of a product, reached by computing positions ahead; None: all positions.
    """

    def __init__(self, head: Logits, hidden: Tensor | None, blocks: Sequence[Block], rows_at_once: int | None) -> None:
        self._head, self._hidden, self._blocks = head, hidden, blocks
        self._rows_at_once = rows_at_once
        self._start = self._stop = 0  # computed positions
        self._row_of: dict[int, int] = {}  # by block
        self._logits = torch.empty(0)  # [rows, positions, tokens]

    def at(self, k: int, active: Sequence[int]) -> Tensor:
        """fp32 [active, tokens] at position ``k``, which does not decrease between calls."""
        if k >= self._stop:
            self._compute(k)
        logits = self._logits[:, k - self._start]
        if len(active) == len(logits):
            return logits
        return logits[to_device(np.array([self._row_of[i] for i in active]), logits.device)]

    def give(self, k: int, hidden: Tensor, left: Sequence[int]) -> None:
        """The states of position ``k`` of the blocks ``left``, [left, d]."""
        if any(self._blocks[i].wants(k) for i in left):
            self._set(k, hidden[:, None], left)

    def _compute(self, k: int) -> None:
        assert self._hidden is not None
        left = [i for i, block in enumerate(self._blocks) if not block.done and k < block.end]
        stop = self._hidden.shape[1]
        if self._rows_at_once is not None:
            stop = min(stop, k + -(-self._rows_at_once // len(left)))
        self._set(k, self._hidden[to_device(np.array(left), self._hidden.device), k:stop], left)

    def _set(self, k: int, hidden: Tensor, left: Sequence[int]) -> None:
        self._start, self._stop = k, k + hidden.shape[1]
        self._logits = self._head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        self._row_of = {i: row for row, i in enumerate(left)}


class _Confidence:
    """Equation 7 as a sum of two parts: of h, and of the token before, one number per row of W_1."""

    def __init__(self, network: BlockNetwork, device: torch.device) -> None:
        assert network.confidence_head is not None
        projection = network.confidence_head.proj
        weight, self._offset = projection.weight.detach().float().to(device)[0], float(projection.bias.item())
        hidden_size = network.config.shape.hidden_size
        self._of_hidden = weight[:hidden_size]
        self._of_row: NDArray[np.float32] | None = None
        self.of_row_on_device: Tensor | None = None
        if network.confidence_head.with_markov and network.markov_head is not None:
            of_row = network.markov_head.markov_w1.weight.detach().float() @ weight[hidden_size:].cpu()
            self._of_row, self.of_row_on_device = of_row.cpu().numpy(), of_row.to(device)

    def on_device(self, hidden: Tensor) -> Tensor:
        """[blocks, steps, d] -> [blocks, steps]"""
        return hidden.float() @ self._of_hidden + self._offset

    def of_hidden(self, hidden: Tensor) -> list[list[float]]:
        """[blocks, steps, d] -> [steps][blocks]"""
        logits: list[list[float]] = self.on_device(hidden).T.tolist()
        return logits

    def of_step(self, of_hidden: Sequence[float], rows: NDArray[np.int64]) -> Sequence[float]:
        """Logits of one position: ``of_hidden`` [blocks], rows of W_1 [blocks]."""
        if self._of_row is None:
            return of_hidden
        return [a + b for a, b in zip(of_hidden, self._of_row[rows].tolist(), strict=True)]


def _noise(blocks: Sequence[Block], num_steps: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Noise keys [blocks, steps] and temperatures [blocks]."""
    seeds = np.array([block.state.sampling.seed for block in blocks], np.uint64)
    positions = np.array([len(block.state) for block in blocks])[:, None] + np.arange(num_steps)
    temperatures = np.array([block.state.sampling.temperature for block in blocks], np.float32)
    return noise_keys(seeds[:, None], positions), temperatures


def _scaled(logit: float, scaling: TemperatureScaling, position: int, margin: float = 0.0) -> float:
    temperature, offset, weight = scaling.at(position)
    logit = logit / temperature + offset + weight * math.log1p(min(margin, _MAX_MARGIN))
    value = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, logit))))
    return max(_MIN_CONFIDENCE, min(1.0 - _MIN_CONFIDENCE, value))


def _make_choice(kernel: GumbelArgmax | None, token_ids: NDArray[np.int64], device: torch.device) -> Choice:
    """argmax_v(logits_v / T + G(key, v)) of each row and its margin (``engine.ops.GumbelArgmax``), where no
    kernel is available among the most probable tokens only. ``token_ids``: of the logits' columns, ascending."""
    if isinstance(kernel, FusedSampling):
        kernel.warm_up(torch.float32, device)

    def by_kernel(
        logits: Tensor, keys: NDArray[np.int64], temperatures: NDArray[np.float32]
    ) -> tuple[list[int], list[float]]:
        assert kernel is not None
        margins = np.empty(len(logits), np.float32)
        return kernel(logits, keys, temperatures, None, margins)[0].tolist(), margins.tolist()

    def among_candidates(
        logits: Tensor, keys: NDArray[np.int64], temperatures: NDArray[np.float32]
    ) -> tuple[list[int], list[float]]:
        found = logits.topk(min(_NUM_CANDIDATES, logits.shape[-1]))
        candidates = token_ids[found.indices.cpu().numpy()]
        below = found.values.float().cpu().numpy()
        below = below - below[:, :1]  # relative to the largest
        scores = below
        if temperatures.any():
            noised = below / np.maximum(temperatures, 1e-6)[:, None] + gumbel(keys[:, None], candidates)
            scores = np.where(temperatures[:, None] > 0.0, noised, below)
        first, second = np.sort(scores, axis=-1)[:, :-3:-1].T
        is_first = scores == first[:, None]
        chosen = np.where(is_first, candidates, np.iinfo(np.int64).max).min(-1)  # the lowest id of equal ones
        return chosen.tolist(), (first - second).tolist()

    return among_candidates if kernel is None else by_kernel
