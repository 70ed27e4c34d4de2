"""The sequential stage on a GPU: all positions of a round are launched at once, between one copy of what is given to the
device and one of what was chosen from it. The number of launches does not depend on the number of drafts. With graphs, the
block or the steps of EAGLE-3 and this stage are one launch, of a round of the next size that was recorded."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from cluster.errors import OutriderError
from drafters.hidden_states.heads import MarkovHead
from drafters.hidden_states.stage import BegunStates, StateInputs, States
from engine.device import to_device, to_host
from engine.ops import FusedSampling, Graphs, Logits, Recordable

_NOT_GIVEN = -1


@dataclass(frozen=True, slots=True)
class Given:
    """Of a round of B drafts of up to K tokens: the anchors [B], tokens given for positions [K, B] or ``_NOT_GIVEN``, and
    the records of the choices [K, B, words] (``FusedSampling.records``)."""

    anchors: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    records: NDArray[np.int64]

    def packed(self) -> NDArray[np.int64]:
        return np.concatenate([part.ravel() for part in (self.anchors, self.token_ids, self.records)])

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three of them in what was ``packed``, on any device."""
        parts = buffer.split([self.anchors.size, self.token_ids.size, self.records.size])
        return parts[0], parts[1].view(self.token_ids.shape), parts[2].view(self.records.shape)

    @classmethod
    def of(cls, anchors: Sequence[int], ahead: Sequence[Sequence[int]], records: NDArray[np.int64]) -> "Given":
        token_ids = np.full(records.shape[:2], _NOT_GIVEN, np.int64)
        for i, tokens in enumerate(ahead):
            token_ids[: len(tokens), i] = tokens
        return cls(np.array(anchors, np.int64), token_ids, records)


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """``markov_rows`` int64 [vocab]: the row of W_1 of each token. ``of_hidden``: the part of the logit of the confidence
    head that states give, [B, K, d] -> [B, K]; ``of_row``: what a row of W_1 adds, fp32 [rows], if there is such a part.
    ``graphs``: that replay a whole round, if there are any."""

    head: Logits
    kernel: FusedSampling
    markov: MarkovHead | None
    bias: Logits | None
    markov_rows: Tensor
    of_hidden: Callable[[Tensor], Tensor] | None
    of_row: Tensor | None
    graphs: Graphs | None

    def padded(self, num_drafts: int, num_steps: int, draft_len: int, max_len: int) -> tuple[int, int] | None:
        """Drafts and steps of the round that is recorded for so many; None: it is launched. ``draft_len``: of a whole draft;
        ``max_len``: of the longest that is recorded."""
        drafts = None if self.graphs is None else self.graphs.padded(num_drafts)
        if drafts is None or num_steps > max_len:
            return None
        return drafts, padded_steps(num_steps, draft_len, max_len)

    @torch.inference_mode()
    def record(self, begin: Callable[[], BegunStates], max_len: int, draft_len: int) -> None:
        """Records the rounds of every size, the largest first, in whose memory the others fit. ``begin``: any drafts;
        ``max_len``: of a draft. Raises OutriderError: the device refuses one."""
        if self.graphs is None:
            return
        states, steps = begin(), {padded_steps(k, draft_len, max_len) for k in range(1, max_len + 1)}
        for num_drafts, num_steps in sorted(product(self.graphs.sizes, steps), reverse=True):
            num = num_drafts * num_steps
            records = self.kernel.records(np.zeros(num, np.int64), np.zeros(num, np.float32))
            given = Given.of([0] * num_drafts, [()] * num_drafts, records.reshape(num_steps, num_drafts, -1))
            try:
                self.graphs.capture(*self._recorded(states, given))
            except RuntimeError as error:
                raise OutriderError(
                    f"no CUDA graph can be made of {num_drafts} drafts of {num_steps} tokens: lower kv_cache_gb if memory "
                    f"is short, else make the drafter remote with the device cpu: {error}"
                ) from error

    @torch.inference_mode()
    def run(self, states: BegunStates, given: Given, is_padded: bool) -> NDArray[np.float64]:
        """What was chosen, [K, B, 5]: the fields of ``engine.ops.RowChoices``; [K, B, 6] with the logit of the confidence
        head, if there is one. ``is_padded``: to the size of a recorded round."""
        if self.graphs is None or not is_padded:
            return to_host(self._choose(states, *given.views(to_device(given.packed(), self.markov_rows.device))))
        return to_host(*self.graphs.run(*self._recorded(states, given)))

    def _recorded(self, states: BegunStates, given: Given) -> tuple[Hashable, Sequence[Tensor], Recordable]:
        """The key of a round, its inputs, and what computes it."""
        num_steps, num_drafts = given.token_ids.shape
        inputs = states.inputs(num_drafts, num_steps)
        parts = (to_device(given.packed(), self.markov_rows.device), *inputs.parts)
        return (num_drafts, num_steps), parts, partial(self._compute, inputs, given)

    def _compute(self, inputs: StateInputs, given: Given, parts: Sequence[Tensor]) -> tuple[Tensor]:
        packed, *of_states = parts
        return (self._choose(inputs.states(of_states), *given.views(packed)),)

    def _choose(self, states: States, anchors: Tensor, token_ids: Tensor, records: Tensor) -> Tensor:
        hidden, (num_steps, num_drafts) = states.known(), token_ids.shape
        of_hidden = None if self.of_hidden is None or hidden is None else self.of_hidden(hidden)
        is_free = token_ids == _NOT_GIVEN
        previous, state = anchors, None
        found: list[Tensor] = []
        logits_of_confidence: list[Tensor] = []
        for k in range(num_steps):
            h = states.step(k, range(num_drafts), previous) if hidden is None else hidden[:, k]
            logits = self.head(h.contiguous())
            own = None if of_hidden is None else of_hidden[:, k]
            if self.markov is not None and self.bias is not None:
                rows = self.markov_rows[previous]
                embeddings = embedding(rows, self.markov.markov_w1.weight)
                latents, state = self.markov.step(embeddings, h.to(embeddings.dtype), state)
                logits = self.bias(latents.to(h.dtype), logits)
                if own is not None and self.of_row is not None:
                    own = own + self.of_row[rows]
            found.append(self.kernel.choose_records(logits, records[k]))
            previous = torch.where(is_free[k], found[k][:, 0].long(), token_ids[k])
            if own is not None:
                logits_of_confidence.append(own)
        chosen = torch.stack(found)
        if logits_of_confidence:
            chosen = torch.cat([chosen, torch.stack(logits_of_confidence)[..., None].double()], dim=-1)
        return chosen


def padded_steps(num_steps: int, draft_len: int, max_len: int) -> int:
    """The next power of two, at most ``draft_len``; beyond, which EAGLE-3 alone drafts, a power of two times that, at most
    ``max_len``."""
    is_long = num_steps > draft_len
    unit = draft_len if is_long else 1
    padded = unit << (-(-num_steps // unit) - 1).bit_length()
    return min(padded, max_len) if is_long else min(padded, draft_len, max_len)
