"""The losses of distillation (DSpark, equations 8 to 12), over a vocabulary that may be a part of the target's.

What the target says outside the drafter's vocabulary cannot be drafted: it counts as lost, in total variation and in the
acceptance that the confidence head is taught.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CE_WEIGHT, MATCH_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
ANNEALED_UNTIL = 0.3  # of training: until then Kullback-Leibler divergence turns into total variation


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """Of n positions: log-probabilities of the drafter's vocabulary, [n, size], normalised over all of the target's."""

    log_probs: Tensor

    @classmethod
    def of(cls, hidden: Tensor, head: Tensor, normalisers: Tensor) -> "TargetDistribution":
        """``hidden`` [n, d], ``head`` [size, d]: the rows of the drafter's vocabulary; ``normalisers`` [n]."""
        with torch.no_grad():
            return cls(F.linear(hidden, head).float() - normalisers[:, None])


@dataclass(frozen=True, slots=True)
class Losses:
    """Weighted means over positions. ``acceptance``: 1 - total variation, of each position, [n]."""

    total: Tensor
    cross_entropy: Tensor
    match: Tensor
    confidence: Tensor
    acceptance: Tensor


def distillation(
    logits: Tensor,
    target: TargetDistribution,
    places: Tensor,
    weights: Tensor,
    progress: float,
    confidence_logits: Tensor | None = None,
) -> Losses:
    """Args:
    logits: the drafter's, [n, size].
    places: of the token that came, in the drafter's vocabulary, int64 [n]; -1: outside.
    weights: of the positions, [n]; they need not sum to 1.
    progress: of the training, 0 to 1.
    """
    log_q = logits.float().log_softmax(-1)
    p = target.log_probs.exp()
    inside = places >= 0
    scale = weights / weights.sum()
    own = log_q.gather(1, places.clamp_min(0)[:, None]).squeeze(1)
    cross_entropy = -(scale * inside * own).sum()
    q = log_q.exp()
    acceptance = torch.minimum(p, q).sum(-1)
    annealed = min(1.0, progress / ANNEALED_UNTIL)
    # |p - q|_1 over all tokens is 2 (1 - sum of minima), for outside the vocabulary q is 0.
    variation = 2.0 * (scale * (1.0 - acceptance)).sum()
    match = annealed * variation
    if annealed < 1.0:
        match = match - (1.0 - annealed) * (scale * (p * log_q).sum(-1)).sum()
    confidence = logits.new_zeros((), dtype=torch.float32)
    if confidence_logits is not None:
        # Equation 11; the label is no path for gradients.
        each = F.binary_cross_entropy_with_logits(
            confidence_logits.float(), acceptance.detach().clamp(0, 1), reduction="none"
        )
        confidence = (scale * each).sum()
    total = CE_WEIGHT * cross_entropy + MATCH_WEIGHT * match + CONFIDENCE_WEIGHT * confidence
    return Losses(total, cross_entropy.detach(), variation.detach(), confidence.detach(), acceptance.detach())


def target_at(features: Tensor, normalisers: Tensor, rows: Tensor, head: Tensor) -> TargetDistribution:
    """After each of ``rows``, [n]. A row's distribution is computed once, however often it is wanted.

    ``features``: as of ``readings.Reading``, of all rows; ``head``: as of ``TargetDistribution.of``.
    """
    unique, place = rows.unique(return_inverse=True)
    hidden = features[unique, -head.shape[1] :]
    found = TargetDistribution.of(hidden, head.detach().to(hidden.dtype), normalisers[unique])
    return TargetDistribution(found.log_probs[place])


def position_weights(block_size: int) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 .. gamma: early positions decide how many tokens are accepted."""
    return torch.exp(-torch.arange(block_size) / block_size)
