"""The choice of tokens over a vocabulary that is split over the ranks: the rows are gathered, and rank 0, which alone has
sampling parameters and grammars, tells the others what it chose."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from engine.forward import CausalModel
from engine.sampling import Chosen, Sampler, SampleSpan
from engine.tensor_parallel.ranks import RankGroup
from engine.tensor_parallel.sharding import shard_of


def sampler_of(model: CausalModel) -> "Sampler | ShardedSampler":
    """The sampler for the logits of a model, or of one rank of it."""
    vocab_size = model.config.vocab_size
    whole = Sampler(vocab_size, model.config.eos_token_ids, model.ops.gumbel_argmax(np.arange(vocab_size)))
    if model.ranks is None:
        return whole
    group = model.ranks.group
    widths = [len(shard_of(model.config, rank, group.num_ranks).token_ids) for rank in range(group.num_ranks)]
    return ShardedSampler(whole, widths, group)


class ShardedSampler:
    """``Sampler`` for the logits of one rank: (rows, the rank's tokens). All ranks make the same calls. ``widths``: number
    of tokens of each rank."""

    def __init__(self, whole: Sampler, widths: Sequence[int], ranks: RankGroup) -> None:
        self._whole, self._widths, self._ranks = whole, widths, ranks

    def choose(self, logits: Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        """The tokens are the same on all ranks."""
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

    @torch.inference_mode()
    def gathered(self, logits: Tensor) -> Tensor:
        """The logits of all ranks, (rows, V)."""
        padded = torch.nn.functional.pad(logits, (0, max(self._widths) - logits.shape[1]))
        parts = self._ranks.gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=-1)
