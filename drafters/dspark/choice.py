"""The quick way to one token per row, for requests that ask for nothing but a temperature.

The engine's sampler looks at the whole vocabulary, because a target's token must be exact. A draft only has to be likely: it
is looked for with the target's own noise, on a CPU by one call of a kernel, elsewhere among the most probable tokens. What
that misses are tokens of the tail, which a drafter would not guess either.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.noise import gumbel
from engine.ops import GumbelArgmax, Ops
from engine.sampling import SamplingState

NUM_CANDIDATES = 64

# Tokens of rows: fp32 logits [rows, n], keys of the noise [rows], temperatures fp32 [rows].
Choice = Callable[[Tensor, NDArray[np.int64], NDArray[np.float32]], list[int]]


def is_plain(state: SamplingState) -> bool:
    """Whether the choice depends on logits, temperature and seed alone."""
    s = state.sampling
    edited = s.edits_logits or s.min_tokens > state.num_generated
    return not edited and s.top_k is None and s.top_p == 1.0 and s.min_p == 0.0


def make_choice(ops: Ops, token_ids: NDArray[np.int64]) -> Choice:
    """The fastest way that ``ops`` have.

    Args:
        token_ids: that the columns of the logits are for, ascending.
    """
    kernel = ops.gumbel_argmax(token_ids)
    return partial(choose_plain, token_ids) if kernel is None else partial(_choose, kernel)


def _choose(kernel: GumbelArgmax, logits: Tensor, keys: NDArray[np.int64], temperatures: NDArray[np.float32]) -> list[int]:
    chosen: list[int] = kernel(logits, keys, temperatures)[0].tolist()
    return chosen


def choose_plain(
    token_ids: NDArray[np.int64], logits: Tensor, keys: NDArray[np.int64], temperatures: NDArray[np.float32]
) -> list[int]:
    """argmax_v(logits_v / T + G(key, v)) of each row, over its most probable tokens (DESIGN idea 1).

    Args:
        logits: [rows, n] on any device.
        keys: of the noise, [rows].
        temperatures: [rows].
    """
    if not temperatures.any():
        largest: list[int] = token_ids[logits.argmax(-1).cpu().numpy()].tolist()
        return largest
    found = logits.topk(min(NUM_CANDIDATES, logits.shape[-1]))
    candidates = token_ids[found.indices.cpu().numpy()]
    below = found.values.float().cpu().numpy()
    below = below - below[:, :1]  # of the largest
    noise = gumbel(keys[:, None], candidates)
    # Greedy rows take the lowest of the tokens that are largest.
    scores = np.where(
        temperatures[:, None] > 0.0,
        below / np.maximum(temperatures, 1e-6)[:, None] + noise,
        np.where(below == 0.0, -candidates.astype(np.float64), -np.inf),
    )
    chosen: list[int] = candidates[np.arange(len(candidates)), scores.argmax(-1)].tolist()
    return chosen
