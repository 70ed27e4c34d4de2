"""The sequential stage on a GPU: all positions of a round are launched at once, between one copy of what is given to the
device and one of what was chosen from it. The number of launches does not depend on the number of drafts. With graphs, the
block or the steps of EAGLE-3 and this stage are one launch, of a round with as many drafts and steps as were recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from drafters.hidden_states.heads import MarkovHead
from drafters.hidden_states.stage import BegunStates, StateInputs, States
from engine.device import to_device, to_host
from engine.ops import FusedSampling, Graphs, Logits

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

    def padded(self, num_drafts: int, num_steps: int, draft_len: int) -> tuple[int, int]:
        """Drafts and steps of the round that is recorded for so many. ``draft_len``: of a whole draft."""
        drafts = None if self.graphs is None else self.graphs.padded(num_drafts)
        if self.graphs is None or drafts is None:
            return num_drafts, num_steps
        steps = None if num_steps > draft_len else self.graphs.padded(num_steps)
        return drafts, num_steps if steps is None else min(steps, draft_len)

    @torch.inference_mode()
    def run(self, states: BegunStates, given: Given) -> NDArray[np.float64]:
        """What was chosen, [K, B, 5]: the fields of ``engine.ops.RowChoices``; [K, B, 6] with the logit of the confidence
        head, if there is one."""
        num_steps, num_drafts = given.token_ids.shape
        packed, device = given.packed(), self.markov_rows.device
        if self.graphs is None or self.graphs.padded(num_drafts) != num_drafts:
            return to_host(self._choose(states, *given.views(to_device(packed, device))))
        inputs = states.inputs(num_drafts, num_steps)
        parts = (to_device(packed, device), *inputs.parts)
        return to_host(*self.graphs.run((num_drafts, num_steps), parts, partial(self._compute, inputs, given)))

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
