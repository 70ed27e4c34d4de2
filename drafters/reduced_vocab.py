"""Sampling with a reduced head by the target's rule and noise (DESIGN idea 1).

In general the logits are scattered over the whole vocabulary, -inf elsewhere, and the target's sampler chooses. That
takes a third of a small drafter's step. So requests with no other sampling parameter than a temperature, nearly all,
are sampled from the head's tokens alone.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from engine.noise import gumbel, noise_keys
from engine.sampling import Chosen, Sampler, SampleSpan

# Log of the least share of the likeliest token's probability for a sampled token. A less likely one would be sampled at most
# once in ten thousand times; the draft is wrong then.
_MIN_LOG = -12.0


class ReducedHead:
    """A head over part of the vocabulary.

    Args:
        token_ids: of its logits, ascending int64.
        vocab_size: of the whole vocabulary.
    """

    def __init__(self, token_ids: Tensor, vocab_size: int, sampler: Sampler) -> None:
        self._token_ids = token_ids
        self._ids = token_ids.cpu().numpy()
        self._vocab_size = vocab_size
        self._sampler = sampler
        self._full = torch.empty(0, vocab_size)

    def choose(self, logits: Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        """As ``Sampler.choose`` with confidences; ``logits`` (rows, len(token_ids))."""
        if logits.device.type == "cpu" and all(span.state.is_plain for span in spans):
            return self._sample(logits, spans)
        return self._sampler.choose(self._spread(logits), spans, want_confidences=True)

    @torch.inference_mode()
    def _spread(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary, overwritten by the next call."""
        if len(self._full) < len(logits) or self._full.dtype != logits.dtype:
            self._full = logits.new_full((2 * len(logits), self._vocab_size), -torch.inf)
        return self._full[: len(logits)].index_copy_(1, self._token_ids, logits)

    @torch.inference_mode()
    def _sample(self, logits: Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        row_spans = [span for span in spans for _ in range(span.num_rows)]
        temperatures = np.array([span.state.sampling.temperature for span in row_spans], np.float32)
        noisy = temperatures > 0.0
        x = logits.float()
        highest, winners = (array.numpy() for array in x.max(-1))
        z = x.sub_(torch.from_numpy(highest)[:, None])
        if noisy.any():
            z.div_(torch.from_numpy(np.where(noisy, temperatures, 1.0).astype(np.float32))[:, None])
            winners = np.where(noisy, self._sampled(z, spans, noisy, winners), winners)
        probabilities = z.exp_()
        own = probabilities[torch.arange(len(z)), torch.from_numpy(winners)] / probabilities.sum(-1)
        token_ids, confidences = self._ids[winners].tolist(), own.tolist()
        ends = list(accumulate((span.num_rows for span in spans), initial=0))
        return [_chosen(token_ids, confidences, highest, range(*pair)) for pair in pairwise(ends)]

    def _sampled(self, z: Tensor, spans: Sequence[SampleSpan], noisy: np.ndarray, winners: np.ndarray) -> np.ndarray:
        """argmax of z + G in rows with noise: indices into the head's tokens, (rows,)."""
        firsts = [len(span.state) + span.num_before for span in spans]
        positions = np.concatenate([np.arange(n, n + span.num_rows) for n, span in zip(firsts, spans, strict=True)])
        seeds = np.array([span.state.sampling.seed for span in spans for _ in range(span.num_rows)], np.uint64)
        rows, columns = (
            index.numpy() for index in (z >= _MIN_LOG).logical_and_(torch.from_numpy(noisy)[:, None]).nonzero(as_tuple=True)
        )
        scores = z.numpy()[rows, columns] + gumbel(noise_keys(seeds, positions)[rows], self._ids[columns])
        order = np.lexsort((scores, rows))  # by row, the best of each last
        last = np.append(rows[order][1:] != rows[order][:-1], True)[: len(order)]
        sampled = winners.copy()
        sampled[rows[order][last]] = columns[order][last]
        return sampled


def _chosen(token_ids: Sequence[int], confidences: Sequence[float], highest: np.ndarray, rows: range) -> Chosen:
    for i, row in enumerate(rows):
        if not np.isfinite(highest[row]):
            return Chosen(
                tuple(token_ids[row] for row in rows[:i]),
                confidences=tuple(confidences[row] for row in rows[:i]),
                error=f"no token can be chosen: the logits hold {highest[row]}",
            )
    return Chosen(tuple(token_ids[row] for row in rows), confidences=tuple(confidences[row] for row in rows))
