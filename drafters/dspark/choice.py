"""A fast choice of one token per row, for requests that set nothing but a temperature.

On a CPU one kernel call finds it with the target's noise. Elsewhere it is chosen among the most probable tokens.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.noise import gumbel
from engine.ops import Ops

NUM_CANDIDATES = 64

# Tokens of rows: fp32 logits [rows, n], noise keys [rows], temperatures fp32 [rows].
Choice = Callable[[Tensor, NDArray[np.int64], NDArray[np.float32]], list[int]]


def make_choice(ops: Ops, token_ids: NDArray[np.int64]) -> Choice:
    """argmax_v(logits_v / T + G(key, v)) of each row (DESIGN idea 1), by the fastest implementation that ``ops`` has.

    Args:
        token_ids: of the logits' columns, ascending.
    """
    kernel = ops.gumbel_argmax(token_ids)

    def by_kernel(logits: Tensor, keys: NDArray[np.int64], temperatures: NDArray[np.float32]) -> list[int]:
        assert kernel is not None
        chosen: list[int] = kernel(logits, keys, temperatures)[0].tolist()
        return chosen

    def among_candidates(logits: Tensor, keys: NDArray[np.int64], temperatures: NDArray[np.float32]) -> list[int]:
        if not temperatures.any():
            largest: list[int] = token_ids[logits.argmax(-1).cpu().numpy()].tolist()
            return largest
        found = logits.topk(min(NUM_CANDIDATES, logits.shape[-1]))
        candidates = token_ids[found.indices.cpu().numpy()]
        below = found.values.float().cpu().numpy()
        below = below - below[:, :1]  # relative to the largest
        # At temperature 0: the lowest id of the largest.
        scores = np.where(
            temperatures[:, None] > 0.0,
            below / np.maximum(temperatures, 1e-6)[:, None] + gumbel(keys[:, None], candidates),
            np.where(below == 0.0, -candidates.astype(np.float64), -np.inf),
        )
        chosen: list[int] = candidates[np.arange(len(candidates)), scores.argmax(-1)].tolist()
        return chosen

    return among_candidates if kernel is None else by_kernel
