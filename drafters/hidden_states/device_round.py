"""The sequential stage on a GPU: all positions of a round are launched at once, between one copy of what is given to the
device and one of what was chosen from it. The number of launches does not depend on the number of drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from drafters.hidden_states.heads import MarkovHead
from drafters.hidden_states.stage import States
from engine.device import to_device, to_host
from engine.ops import FusedSampling, Logits

_NOT_GIVEN = -1


@dataclass(frozen=True, slots=True)
class Given:
    """Of a round of B drafts of up to K tokens: the anchors [B], tokens given for positions [K, B] or ``_NOT_GIVEN``, and
    the records of the choices [K, B, words] (``FusedSampling.records``)."""

    anchors: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    records: NDArray[np.int64]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """In one copy."""
        parts = self.anchors, self.token_ids, self.records
        buffer = to_device(np.concatenate([part.ravel() for part in parts]), device)
        views = buffer.split([part.size for part in parts])
        return views[0], views[1].view(self.token_ids.shape), views[2].view(self.records.shape)

    @classmethod
    def of(cls, anchors: Sequence[int], ahead: Sequence[Sequence[int]], records: NDArray[np.int64]) -> "Given":
        token_ids = np.full(records.shape[:2], _NOT_GIVEN, np.int64)
        for i, tokens in enumerate(ahead):
            token_ids[: len(tokens), i] = tokens
        return cls(np.array(anchors, np.int64), token_ids, records)


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """``markov_rows`` int64 [vocab]: the row of W_1 of each token. ``confidence``: what a row of W_1 adds to the logit of
    the confidence head, fp32 [rows], if there is such a part."""

    head: Logits
    kernel: FusedSampling
    markov: MarkovHead | None
    bias: Logits | None
    markov_rows: Tensor
    confidence: Tensor | None

    @torch.inference_mode()
    def run(self, states: States, given: Given, of_hidden: Tensor | None) -> NDArray[np.float64]:
        """What was chosen, [K, B, 5]: the fields of ``engine.ops.RowChoices``; [K, B, 6] with the logit of the confidence
        head, if its part that the states give, ``of_hidden`` [B, K], is known."""
        hidden = states.known()
        anchors, token_ids, records = given.on(self.markov_rows.device)
        num_steps, num_drafts = token_ids.shape
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
                if own is not None and self.confidence is not None:
                    own = own + self.confidence[rows]
            found.append(self.kernel.choose_records(logits, records[k]))
            previous = torch.where(is_free[k], found[k][:, 0].long(), token_ids[k])
            if own is not None:
                logits_of_confidence.append(own)
        chosen = torch.stack(found)
        if logits_of_confidence:
            chosen = torch.cat([chosen, torch.stack(logits_of_confidence)[..., None].double()], dim=-1)
        return to_host(chosen)
