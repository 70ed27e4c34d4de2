"""The choice of tokens over a vocabulary that is split over the ranks. Every rank chooses the same tokens.

For most requests each rank finds the best candidate of its own tokens, and the ranks exchange token, logit and largest logit
of each row: 24 bytes. Top-k, top-p, min-p and log-probabilities depend on the whole row, and grammars are compiled on rank 0
alone: there the rows are gathered, and rank 0 tells the others what it chose.

    score(v) = (z_v - max z) / T + G(seed, position, v)        the lowest id of equal ones, as in ``engine.sampling``

Within a rank, the maximum is of the rank's own tokens: a tie that differs by rounding alone may go another way than on one
rank, as it may for the logits themselves, whose sums are rounded in another order.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device import to_device
from engine.forward import CausalModel
from engine.gumbel_argmax import relative
from engine.noise import gumbel
from engine.sampling import (
    Chosen,
    Picks,
    Sampler,
    SampleSpan,
    SamplingState,
    chosen_of,
    keys_of,
    temperatures_of,
)
from engine.tensor_parallel.ranks import RankGroup
from engine.tensor_parallel.sharding import shard_of


def sampler_of(model: CausalModel) -> "Sampler | ShardedSampler":
    """The sampler for the logits of a model, or of one rank of it."""
    vocab_size, eos = model.config.vocab_size, model.config.eos_token_ids
    whole = Sampler(vocab_size, eos, model.ops.gumbel_argmax(np.arange(vocab_size)))
    if model.ranks is None:
        return whole
    ranks, own = model.ranks.group, model.ranks.shard.token_ids
    kernel = model.ops.gumbel_argmax(np.arange(own.start, own.stop))
    widths = [len(shard_of(model.config, rank, ranks.num_ranks).token_ids) for rank in range(ranks.num_ranks)]
    return ShardedSampler(whole, Sampler(vocab_size, eos, kernel, own), widths, ranks)


class ShardedSampler:
    """``Sampler.choose`` over the logits of one rank.

    Args:
        whole: for gathered rows.
        own: for the rank's part of the vocabulary.
        widths: number of tokens of each rank.
    """

    def __init__(self, whole: Sampler, own: Sampler, widths: Sequence[int], ranks: RankGroup) -> None:
        self._whole = whole
        self._own = own
        self._widths = widths
        self._ranks = ranks

    @torch.inference_mode()
    def choose(self, logits: Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        """One ``Chosen`` per span, the same on all ranks. ``logits``: (sum of num_rows, the rank's tokens). All ranks call
        this for the same spans."""
        bounds = list(pairwise(accumulate((span.num_rows for span in spans), initial=0)))
        chosen: dict[int, Chosen] = {}
        for needs_row in (False, True):
            alike = [i for i, span in enumerate(spans) if _needs_row(span.state) == needs_row]
            if not alike:
                continue
            x = logits
            if len(alike) < len(spans):
                x = logits[to_device(np.concatenate([np.arange(*bounds[i]) for i in alike]), logits.device)]
            choose = self._over_rows if needs_row else self._over_candidates
            chosen |= zip(alike, choose(x, [spans[i] for i in alike]), strict=True)
        return [chosen[i] for i in range(len(spans))]

    def _over_rows(self, logits: Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        rows = self.gathered(logits)
        if self._ranks.rank == 0:
            chosen = self._whole.choose(rows, spans)
            lens = [len(one.token_ids) for one in chosen]
            token_ids = [token_id for one in chosen for token_id in one.token_ids]
            self._ranks.send(np.array([*lens, *token_ids], np.int64).tobytes())
            return chosen
        told = np.frombuffer(self._ranks.receive(), np.int64).tolist()
        bounds = pairwise(accumulate(told[: len(spans)], initial=len(spans)))
        return [
            Chosen(tuple(told[start:stop]), error=None if stop - start == span.num_rows else "rank 0 could choose no token")
            for (start, stop), span in zip(bounds, spans, strict=True)
        ]

    def gathered(self, logits: Tensor) -> Tensor:
        """The logits of all ranks, (rows, V). All ranks call this for the same rows."""
        padded = torch.nn.functional.pad(logits, (0, max(self._widths) - logits.shape[1]))
        parts = self._ranks.gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=-1)

    def _over_candidates(self, logits: Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        picks = self._own.candidates(logits, spans, want_logits=True)
        assert picks.logits is not None, "they were asked for"
        own = torch.from_numpy(np.stack([picks.token_ids.astype(np.float64), picks.logits, picks.highest]))
        found = torch.stack(self._ranks.gather_on_host(own)).numpy()
        token_ids, highest = best_of(spans, found[:, 0].astype(np.int64), found[:, 1], found[:, 2])
        return chosen_of(spans, Picks(range(self._whole.vocab_size), token_ids, highest, None, None), {})


def best_of(
    members: Sequence[SampleSpan],
    token_ids: NDArray[np.int64],
    logits: NDArray[np.float64],
    highest: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The best candidate and the largest logit of each row, (R,), of those of all ranks, each (ranks, R)."""
    top = highest.max(0)  # NaN, if one rank has it
    temperatures = temperatures_of(members)
    z = relative(torch.from_numpy(logits.T.copy()), torch.from_numpy(top).float(), torch.from_numpy(temperatures)).numpy().T
    noise = gumbel(keys_of(members)[None, :], token_ids).astype(np.float64)
    scores = np.where(temperatures > 0, z.astype(np.float64) + noise, logits)
    scores[np.isneginf(highest)] = -np.inf  # the rank has no token that may be chosen
    best = scores.argmax(0)  # the first of equal ones, which has the lowest ids
    return token_ids[best, np.arange(token_ids.shape[1])], top


def _needs_row(state: SamplingState) -> bool:
    sampling = state.sampling
    is_filtered = sampling.temperature > 0 and state.is_filtered
    return is_filtered or sampling.top_logprobs is not None or sampling.grammar is not None
