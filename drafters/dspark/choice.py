"""The quick way to one token per row, for requests that ask for nothing but a temperature.

The engine's sampler looks at the whole vocabulary, because a target's token must be exact. A draft only has to be likely: it
is looked for among the most probable tokens, with the target's own noise. What that misses are tokens of the tail, which
a drafter would not guess either.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.noise import gumbel, noise_keys
from engine.sampling import SamplingState

NUM_CANDIDATES = 64


def is_plain(state: SamplingState) -> bool:
    """Whether the choice depends on logits, temperature and seed alone."""
    s = state.sampling
    edited = s.has_penalties or s.logit_bias or s.min_tokens > state.num_generated
    return not edited and s.top_k is None and s.top_p == 1.0 and s.min_p == 0.0


def choose_plain(
    logits: Tensor, states: Sequence[SamplingState], num_ahead: Sequence[int], token_ids: NDArray[np.int64] | None
) -> list[int]:
    """argmax_v(logits_v / T + G(seed, position, v)) of each row, over its most probable tokens (DESIGN idea 1).

    Args:
        logits: [rows, n] on any device.
        states: of each row.
        num_ahead: tokens of the row's request after those committed.
        token_ids: ascending, of the n columns; None: the columns are the tokens.
    """
    if all(state.sampling.temperature == 0.0 for state in states):
        columns = logits.argmax(-1).cpu().numpy()
        return (columns if token_ids is None else token_ids[columns]).tolist()
    found = logits.topk(min(NUM_CANDIDATES, logits.shape[-1]))
    candidates = found.indices.cpu().numpy()
    if token_ids is not None:
        candidates = token_ids[candidates]
    below = found.values.float().cpu().numpy()
    below = below - below[:, :1]  # of the largest
    temperatures = np.array([state.sampling.temperature for state in states])
    seeds = np.array([state.sampling.seed for state in states], np.uint64)
    positions = np.array([len(state) + ahead for state, ahead in zip(states, num_ahead, strict=True)])
    noise = gumbel(noise_keys(seeds, positions)[:, None], candidates)
    # Greedy rows take the lowest of the tokens that are largest.
    scores = np.where(
        temperatures[:, None] > 0.0,
        below / np.maximum(temperatures, 1e-6)[:, None] + noise,
        np.where(below == 0.0, -candidates.astype(np.float64), -np.inf),
    )
    return candidates[np.arange(len(candidates)), scores.argmax(-1)].tolist()
