"""The sequential stage as it is run: tokens of all blocks side by side, position after position.

Base logits are made for the blocks that are not done, on a CPU for a few positions at a time; beside them a step costs the
product of W_2, the choice, and next to nothing for the confidence: of equation 7 the part of h is computed for the whole
block at once, and the part of W_1[x] is one number per token, computed when the drafter is made. What does not depend on the
tokens is computed for all steps before the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from drafters.dspark.choice import is_plain, make_choice
from drafters.dspark.network import DSparkNetwork, markov_rows
from engine.cpu.packed import product_dtype
from engine.device import to_device
from engine.factory import make_ops
from engine.models.weights import LinearWeight
from engine.noise import noise_keys
from engine.ops import Logits
from engine.sampling import Sampler, SampleSpan, SamplingState
from profiler.calibration import TemperatureScaling

Floats = NDArray[np.float32]

_UNSCALED = TemperatureScaling()
_CPU_ROWS = 12  # of a head's product: of fewer a row takes longer, of more it does not take less
_LEAST = 1e-6  # a confidence is never quite 0 or 1


@dataclass(slots=True)
class Block:
    """A block on its way to a draft.

    ``ahead``: tokens taken as given at its first positions. The draft is what follows them, at most ``num_tokens``.
    """

    anchor: int  # token
    state: SamplingState
    ahead: tuple[int, ...]
    num_tokens: int
    ends: frozenset[int]  # tokens that nothing follows
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    survival: float = 1.0  # of all tokens so far
    done: bool = False

    @property
    def end(self) -> int:
        """Positions of the block that are wanted, those taken as given included."""
        return len(self.ahead) + self.num_tokens

    def wants(self, k: int) -> bool:
        return not self.done and len(self.ahead) <= k < self.end

    def token_before(self, k: int) -> int:
        """The token before the one that position ``k`` predicts; anything when the block is done."""
        if k == 0:
            return self.anchor
        if k <= len(self.ahead):
            return self.ahead[k - 1]
        return self.token_ids[min(k - len(self.ahead), len(self.token_ids)) - 1] if self.token_ids else self.anchor

    def add(self, token_id: int, confidence: float) -> None:
        self.token_ids.append(token_id)
        self.confidences.append(confidence)
        self.survival *= confidence
        self.done = token_id in self.ends


class SequentialStage:
    """Head, sequential head and confidence head, on one device.

    Args:
        network: read once, here; its weights may be laid out anew.
        scaling: of the confidences, by position.
        min_survival: a draft ends before a token that is less likely than this to be reached and right.
        int8: products with int8 forms of the weights, where there are such products.
    """

    def __init__(
        self,
        network: DSparkNetwork,
        dtype: torch.dtype,
        device: torch.device,
        sampler: Sampler,
        scaling: TemperatureScaling = _UNSCALED,
        min_survival: float = 0.0,
        *,
        int8: bool = False,
    ) -> None:
        config = network.config
        ops = make_ops(config.shape, dtype, device, int8=int8)
        self._device = device
        self._sampler = sampler
        self._scaling = scaling
        self._min_survival = min_survival
        self._head = ops.logits(LinearWeight(network.lm_head.weight.detach().to(device, dtype)))
        self._rows_at_once = _CPU_ROWS if device.type == "cpu" else None
        self._rows = markov_rows(config).numpy()
        self._markov, self._bias = network.markov_head, None
        if self._markov is not None:
            self._markov = self._markov.to(device, product_dtype(dtype, device))
            self._bias = ops.logits(LinearWeight(self._markov.markov_w2.weight.detach().to(dtype)))
        known = range(config.shape.vocab_size) if config.draft_token_ids is None else config.draft_token_ids
        self._race = make_choice(ops, np.array(known, np.int64))
        self._output_ids = None if config.draft_token_ids is None else torch.tensor(known, device=device)
        self._full_logits = torch.empty(0, config.shape.vocab_size, device=device)
        self._confidence = None if network.confidence_head is None else _Confidence(network, device)

    @torch.inference_mode()
    def draft(self, hidden: Tensor, blocks: Sequence[Block]) -> None:
        """Drafts for all blocks, side by side.

        Args:
            hidden: h, [blocks, gamma, d] in the dtype; no block wants more than gamma positions.
        """
        num_steps = max(block.end for block in blocks)
        hidden = hidden[:, :num_steps].contiguous()
        base = _BaseLogits(self._head, hidden, blocks, self._rows_at_once)
        of_hidden = None if self._confidence is None else self._confidence.of_hidden(hidden)
        noise = _Noise.of(blocks, num_steps) if of_hidden is not None and all(is_plain(b.state) for b in blocks) else None
        state: Tensor | None = None
        for k in range(num_steps):
            rows = self._rows[[block.token_before(k) for block in blocks]]
            latents = None
            if self._markov is not None:
                embeddings = embedding(to_device(rows, self._device), self._markov.markov_w1.weight)
                latents, state = self._markov.step(embeddings, hidden[:, k].to(embeddings.dtype), state)
                latents = latents.to(hidden.dtype)
            confidences: Sequence[float | None] = [None] * len(blocks)
            if self._confidence is not None and of_hidden is not None:
                confidences = self._confidence.of_step(of_hidden[k], rows, *self._scaling.at(k))
            for block, confidence in zip(blocks, confidences, strict=True):
                block.done |= confidence is not None and block.wants(k) and block.survival * confidence < self._min_survival
            active = [i for i, block in enumerate(blocks) if block.wants(k)]
            if not active:
                if all(block.done or block.end <= k for block in blocks):
                    return
                continue
            logits = self._logits(base.at(k, active), latents, active)
            if noise is None:
                self._sample(logits, [(blocks[i], confidences[i]) for i in active])
            else:
                token_ids = self._race(logits, noise.keys[active, k], noise.temperatures[active])
                for i, token_id in zip(active, token_ids, strict=True):
                    blocks[i].add(token_id, confidences[i] or _LEAST)

    def _logits(self, base: Tensor, latents: Tensor | None, active: Sequence[int]) -> Tensor:
        """Of the active blocks, fp32, contiguous. ``base``: theirs; ``latents``: of all blocks."""
        if latents is None or self._bias is None:
            return base.contiguous()
        if len(active) < len(latents):
            latents = latents[to_device(np.array(active), self._device)]
        return self._bias(latents, base)

    def _sample(self, logits: Tensor, active: Sequence[tuple[Block, float | None]]) -> None:
        """One token for each of the blocks, by the engine's sampler. A confidence of None: that which the token has."""
        spans = [SampleSpan(block.state, (*block.ahead, *block.token_ids), 1) for block, _ in active]
        all_chosen = self._sampler.choose(self._over_all(logits), spans, want_confidences=self._confidence is None)
        for (block, confidence), chosen in zip(active, all_chosen, strict=True):
            if not chosen.token_ids:  # every token is masked there, and the target will find the same
                block.done = True
                continue
            certain = chosen.confidences[0] if confidence is None else confidence
            if block.survival * certain < self._min_survival:
                block.done = True
            else:
                block.add(chosen.token_ids[0], max(certain, _LEAST))

    def _over_all(self, logits: Tensor) -> Tensor:
        """Over the whole vocabulary: -inf where a reduced head knows no token. Overwritten by the next call."""
        if self._output_ids is None:
            return logits
        if len(self._full_logits) < len(logits):
            self._full_logits = self._full_logits.new_full((len(logits), self._full_logits.shape[1]), -torch.inf)
        return self._full_logits[: len(logits)].index_copy_(1, self._output_ids, logits)


class _BaseLogits:
    """The head's logits, made as they come to be wanted: most blocks end before the last position.

    Args:
        rows_at_once: as many positions are looked ahead as make so many rows; None: all.
    """

    def __init__(self, head: Logits, hidden: Tensor, blocks: Sequence[Block], rows_at_once: int | None) -> None:
        self._head, self._hidden, self._blocks = head, hidden, blocks
        self._rows_at_once = rows_at_once
        self._start = self._stop = 0  # positions that are made
        self._row_of: dict[int, int] = {}  # of a block that was not done then
        self._logits = hidden  # [rows, positions, tokens]

    def at(self, k: int, active: Sequence[int]) -> Tensor:
        """Of active blocks at a position; those of a step come before those of the next. fp32 [active, tokens], rows may lie
        apart."""
        if k >= self._stop:
            self._make(k)
        logits = self._logits[:, k - self._start]
        if len(active) == len(logits):
            return logits
        return logits[to_device(np.array([self._row_of[i] for i in active]), logits.device)]

    def _make(self, k: int) -> None:
        left = [i for i, block in enumerate(self._blocks) if not block.done and k < block.end]
        stop = self._hidden.shape[1]
        if self._rows_at_once is not None:
            stop = min(stop, k + -(-self._rows_at_once // len(left)))
        hidden = self._hidden[to_device(np.array(left), self._hidden.device), k:stop]
        self._logits = self._head(hidden.flatten(0, 1)).view(len(left), stop - k, -1)
        self._start, self._stop = k, stop
        self._row_of = {i: row for row, i in enumerate(left)}


class _Confidence:
    """Equation 7 in two parts: what h gives, and what the token before gives, a number per row of W_1."""

    def __init__(self, network: DSparkNetwork, device: torch.device) -> None:
        assert network.confidence_head is not None
        projection = network.confidence_head.proj
        weight, self._offset = projection.weight.detach().float().to(device)[0], float(projection.bias.item())
        hidden_size = network.config.shape.hidden_size
        self._of_hidden = weight[:hidden_size]
        self._of_row = None
        if network.confidence_head.with_markov and network.markov_head is not None:
            of_row = network.markov_head.markov_w1.weight.detach().float().to(device) @ weight[hidden_size:]
            self._of_row = of_row.cpu().numpy()

    def of_hidden(self, hidden: Tensor) -> list[list[float]]:
        """[blocks, steps, d] -> [steps][blocks]"""
        logits: list[list[float]] = (hidden.float() @ self._of_hidden + self._offset).T.tolist()
        return logits

    def of_step(self, of_hidden: Sequence[float], rows: NDArray[np.int64], temperature: float, offset: float) -> list[float]:
        """Of one position of each block: ``of_hidden`` [blocks], rows of W_1 [blocks]."""
        logits = of_hidden
        if self._of_row is not None:
            logits = [a + b for a, b in zip(of_hidden, self._of_row[rows].tolist(), strict=True)]
        return [_sigmoid(logit / temperature + offset) for logit in logits]


@dataclass(frozen=True, slots=True)
class _Noise:
    """What the choice at each position of each block depends on beside its logits."""

    keys: NDArray[np.int64]  # [blocks, steps]
    temperatures: Floats  # [blocks]

    @classmethod
    def of(cls, blocks: Sequence[Block], num_steps: int) -> "_Noise":
        seeds = np.array([block.state.sampling.seed for block in blocks], np.uint64)
        positions = np.array([len(block.state) for block in blocks])[:, None] + np.arange(num_steps)
        temperatures = np.array([block.state.sampling.temperature for block in blocks], np.float32)
        return cls(noise_keys(seeds[:, None], positions), temperatures)


def _sigmoid(logit: float) -> float:
    value = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, logit))))
    return max(_LEAST, min(1.0 - _LEAST, value))
