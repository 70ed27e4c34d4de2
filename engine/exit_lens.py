"""Estimates of a row's next token after some layer, over a reduced vocabulary, for early exit.

A lens maps the normalised hidden state h after a layer to the final one: x = A h + b, the tuned lens of arXiv 2303.08112,
fitted here by ridge regression on rows that were computed to the end. Without it the head says nothing about most layers
of a small model (docs/measurements/early-exit.md). After the last layer x is exact.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.exit_rows import WatchedRows
from engine.forward import CausalModel
from engine.models.weights import LinearWeight
from engine.noise import BLOCK_LEN, gumbel
from engine.ops import FusedSampling, Linear

_RIDGE = 0.02  # times the number of rows
LAG = 2  # layers that a GPU computes beside a check: the thread of the pass waits for the check, the device does not


@dataclass(frozen=True, slots=True)
class Margins:
    """Of watched rows, [rows], and the seconds that the check took."""

    values: NDArray[np.float32]
    seconds: float

    def wait(self) -> "Margins":
        return self


class PendingMargins(Protocol):
    def wait(self) -> Margins: ...


class ExitScores(Protocol):
    """Checks rows of a pass. Not thread-safe."""

    def begin(
        self, residual: torch.Tensor, delta: torch.Tensor | None, lens: Linear | None, rows: WatchedRows
    ) -> PendingMargins:
        """Of the hidden states ``residual`` + ``delta``, [rows of the pass, hidden]: without a delta they are normalised.
        Neither is modified, nor needed once this returns and the stream of the caller has gone on."""


def runs_beside(model: CausalModel) -> bool:
    """Whether checks of this model run beside its passes: on a GPU."""
    return isinstance(model.ops.gumbel_argmax(np.arange(model.config.vocab_size)), FusedSampling)


def exit_scores(model: CausalModel, head: torch.Tensor, token_ids: NDArray[np.int64]) -> ExitScores:
    """For the device of the model. ``head``: of the whole model. ``token_ids``: the reduced vocabulary, ascending."""
    if not runs_beside(model):
        return ReducedScores(model, head, token_ids)
    from engine.cuda.exit_scores import DeviceScores, InTurn, SideStream
    from engine.cuda.sampling import CudaGumbelArgmax

    kernel = model.ops.gumbel_argmax(token_ids)
    assert isinstance(kernel, CudaGumbelArgmax), "the fused kernel is CUDA's"
    if model.device.type != "cuda":
        return DeviceScores(model, head, token_ids, kernel, InTurn())
    scores = DeviceScores(model, head, token_ids, kernel, SideStream(model.device))
    scores.warm_up()
    return scores


def warm_up(model: CausalModel, head: torch.Tensor, most: int) -> None:
    """On a GPU compiles the kernels of checks over reduced vocabularies of at most ``most`` tokens."""
    for token_ids in spread_vocabularies(len(head), most):
        exit_scores(model, head, token_ids)


def spread_vocabularies(vocab_len: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Reduced vocabularies that differ as kernels do: by the power of two to which their number of noise blocks is rounded
    up, and by whether 16 divides that number."""
    most = min(most, vocab_len)
    least, largest = -(-most // BLOCK_LEN), min(most, -(-vocab_len // BLOCK_LEN))
    tops = {min(largest, 1 << bits) for bits in range(largest.bit_length() + 1)}
    for num in sorted({num for top in tops for num in (top, top - 1, top // 16 * 16) if num >= least}):
        firsts = np.arange(num) * BLOCK_LEN
        others = np.setdiff1d(np.arange(vocab_len), firsts)
        yield np.sort(np.concatenate([firsts, others[: most - num]]))


class LensFit:
    """Sums for the regression of one lens. ``hidden_size``: d."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._gram = torch.zeros(hidden_size + 1, hidden_size + 1, device=device)
        self._cross = torch.zeros(hidden_size + 1, hidden_size, device=device)
        self._num_rows = 0

    def add(self, hidden: torch.Tensor, final: torch.Tensor) -> None:
        """Adds rows: normalised hidden states and final ones, both [rows, d]."""
        inputs = F.pad(hidden.float(), (0, 1), value=1.0)
        self._gram.addmm_(inputs.T, inputs)
        self._cross.addmm_(inputs.T, final.float())
        self._num_rows += len(hidden)

    def solve(self) -> LinearWeight:
        """A [d, d] and b [d], fp32."""
        ridge = _RIDGE * self._num_rows * torch.eye(len(self._gram), device=self._gram.device)
        solution = torch.linalg.solve(self._gram + ridge, self._cross)
        return LinearWeight(solution[:-1].T.contiguous(), solution[-1].clone())


class ReducedScores:
    """``ExitScores`` on a CPU, within the pass. Margins of drafted tokens over ``token_ids``, ascending, from estimates of
    final hidden states."""

    def __init__(self, model: CausalModel, head: torch.Tensor, token_ids: NDArray[np.int64]) -> None:
        self.token_ids = token_ids
        self._rows = head
        self._model, self._dtype = model, model.dtype
        self._unit = torch.ones(model.config.hidden_size)
        self._head = model.ops.linear(LinearWeight(head[torch.from_numpy(token_ids)].to(model.dtype)))
        self._kernel = model.ops.gumbel_argmax(token_ids)

    def begin(self, residual: torch.Tensor, delta: torch.Tensor | None, lens: Linear | None, rows: WatchedRows) -> Margins:
        start_s, at = time.perf_counter(), torch.from_numpy(rows.at)
        hidden = residual[at] if delta is None else self._model.ops.add_norm(residual[at], delta[at], self._unit)
        x = hidden if lens is None else lens(hidden)
        return Margins(self.margins(x, rows), time.perf_counter() - start_s)

    def margins(self, x: torch.Tensor, rows: WatchedRows) -> NDArray[np.float32]:
        """``margins_of`` the rows whose final hidden states are ``x``, [rows, hidden] in the dtype."""
        logits, keys, temperatures = self._head(x), rows.keys, rows.temperatures
        noise = temperatures > 0
        if noise.any() and self._kernel is not None:
            columns = np.searchsorted(self.token_ids, self._kernel(logits, keys, temperatures)[0])
        else:
            scores = logits.float().numpy() / np.where(noise, temperatures, np.float32(1.0))[:, None]
            scores[noise] += gumbel(keys[noise, None], self.token_ids[None])
            columns = scores.argmax(1)
        best = self.token_ids[columns]
        z_best = logits.gather(1, torch.from_numpy(columns)[:, None]).squeeze(1).float()
        own = F.embedding(torch.from_numpy(rows.drafts), self._rows).float()
        z_draft = (x.float() * own).sum(-1).to(self._dtype).float()
        return margins_of(rows, best, z_best.numpy(), z_draft.numpy())


def margins_of(
    rows: WatchedRows, best: NDArray[np.int64], z_best: NDArray[np.floating], z_draft: NDArray[np.floating]
) -> NDArray[np.float32]:
    """(z_u - z_draft) / T + G(u) - G(draft) of the best token u of the reduced vocabulary, [rows]; 0 where u is the drafted
    token. At temperature 0 without noise and with T = 1."""
    has_noise, drafts = rows.temperatures > 0, rows.drafts
    margins = (z_best - z_draft) / np.where(has_noise, rows.temperatures, np.float32(1.0))
    noise = gumbel(rows.keys[has_noise], best[has_noise]) - gumbel(rows.keys[has_noise], drafts[has_noise])
    margins[has_noise] += noise
    return np.where(best == drafts, np.float32(0.0), margins).astype(np.float32)


def lens_product(model: CausalModel, weight: LinearWeight) -> Linear:
    bias = None if weight.bias is None else weight.bias.to(model.dtype)
    return model.ops.linear(LinearWeight(weight.dense.to(model.dtype), bias))
