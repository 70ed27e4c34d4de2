"""Estimates of a row's next token after some layer, over a reduced vocabulary, for early exit.

A lens maps the normalised hidden state h after a layer to the final one: x = A h + b, the tuned lens of arXiv 2303.08112,
fitted here by ridge regression on rows that were computed to the end. Without it the head says nothing about most layers
of a small model (docs/measurements/early-exit.md). After the last layer x is exact.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.forward import CausalModel
from engine.models.weights import LinearWeight
from engine.noise import gumbel
from engine.ops import Linear

VOCABULARY_LEN = 1024  # the most frequent tokens; of them, the best competes with the drafted token
_RIDGE = 0.02  # times the number of rows


class LensFit:
    """Sums for the regression of one lens. ``hidden_size``: d."""

    def __init__(self, hidden_size: int) -> None:
        self._gram = torch.zeros(hidden_size + 1, hidden_size + 1)
        self._cross = torch.zeros(hidden_size + 1, hidden_size)

    def add(self, hidden: torch.Tensor, final: torch.Tensor) -> None:
        """Adds rows: normalised hidden states and final ones, both [rows, d]."""
        inputs = F.pad(hidden.float(), (0, 1), value=1.0)
        self._gram.addmm_(inputs.T, inputs)
        self._cross.addmm_(inputs.T, final.float())

    def solve(self) -> LinearWeight:
        """A [d, d] and b [d], fp32."""
        num_rows = float(self._gram[-1, -1])
        ridge = _RIDGE * num_rows * torch.eye(len(self._gram))
        solution = torch.linalg.solve(self._gram + ridge, self._cross)
        return LinearWeight(solution[:-1].T.contiguous(), solution[-1].clone())


class ReducedScores:
    """Margins of drafted tokens over ``token_ids``, ascending, from estimates of final hidden states."""

    def __init__(self, model: CausalModel, head: torch.Tensor, token_ids: NDArray[np.int64]) -> None:
        self.token_ids = token_ids
        self._rows = head
        self._dtype = model.dtype
        self._head = model.ops.linear(LinearWeight(head[torch.from_numpy(token_ids)].to(model.dtype)))
        self._kernel = model.ops.gumbel_argmax(token_ids)

    def margins(
        self, x: torch.Tensor, drafts: NDArray[np.int64], keys: NDArray[np.int64], temperatures: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """(z_u - z_draft) / T + G(u) - G(draft) of the best token u of the reduced vocabulary, [rows]; 0 where u is the
        drafted token. ``x`` [rows, hidden] in the dtype, ``keys`` of the noise. At temperature 0
        without noise and with T = 1.
        """
        logits = self._head(x)
        divisors = np.where(temperatures > 0, temperatures, np.float32(1.0))
        noise = temperatures > 0
        has_noise = bool(noise.any())
        if has_noise and self._kernel is not None:
            columns = np.searchsorted(self.token_ids, self._kernel(logits, keys, temperatures)[0])
        else:
            scores = logits.float().numpy() / divisors[:, None]
            if has_noise:
                scores[noise] += gumbel(keys[noise, None], self.token_ids[None])
            columns = scores.argmax(1)
        best = self.token_ids[columns]
        z_best = logits.gather(1, torch.from_numpy(columns)[:, None]).squeeze(1).float()
        own = F.embedding(torch.from_numpy(drafts), self._rows).float()
        z_draft = (x.float() * own).sum(-1).to(self._dtype).float()
        margins = (z_best - z_draft).numpy() / divisors
        if has_noise:
            margins += np.where(noise, gumbel(keys, best) - gumbel(keys, drafts), np.float32(0.0))
        return np.where(best == drafts, np.float32(0.0), margins).astype(np.float32)


def lens_product(model: CausalModel, weight: LinearWeight) -> Linear:
    bias = None if weight.bias is None else weight.bias.to(model.dtype)
    return model.ops.linear(LinearWeight(weight.dense.to(model.dtype), bias))
