"""Distillation losses (DSpark, equations 8 to 12). Target probability outside a reduced vocabulary counts as lost in total
variation and acceptance."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.packed import product_dtype

CE_WEIGHT, MATCH_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
ANNEALED_UNTIL = 0.3  # share of training over which KL divergence turns into total variation
# Of logits at once: a dozen passes go over them, so on a CPU they must fit its cache.
_ROWS_AT_ONCE = {"cpu": 32, "cuda": 2048}


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """The target's distribution at n positions, over the drafter's vocabulary. Positions may share a row."""

    logits: Tensor  # [m, size]
    normalisers: Tensor  # [m]: log sum exp over the target's whole vocabulary
    rows: Tensor  # int64 [n]

    @classmethod
    def at(cls, features: Tensor, normalisers: Tensor, rows: Tensor, head: Tensor) -> "TargetDistribution":
        """At ``rows`` of ``features``, [n]; ``head``: the target's rows of the drafter's vocabulary, [size, d]."""
        unique, index = rows.unique(return_inverse=True)
        with torch.no_grad():
            hidden = features[unique, -head.shape[1] :]
            kind = product_dtype(hidden.dtype, hidden.device)
            return cls(F.linear(hidden.to(kind), head.to(kind)), normalisers[unique], index)

    def log_probs(self, part: slice) -> Tensor:
        """fp32 [len(part), size]"""
        rows = self.rows[part]
        return self.logits[rows].float() - self.normalisers[rows, None]


@dataclass(frozen=True, slots=True)
class Losses:
    """Weighted means over positions."""

    total: Tensor
    cross_entropy: Tensor
    match: Tensor
    confidence: Tensor
    acceptance: Tensor  # 1 - total variation of each position, [n]


def distillation(
    logits: Tensor,
    target: TargetDistribution,
    token_indices: Tensor,
    weights: Tensor,
    progress: float,
    confidence_logits: Tensor | None = None,
) -> Losses:
    """Of the drafter's ``logits`` [n, size], with ``weights`` [n] of the positions and ``progress`` of training, 0 to 1.

    ``token_indices``: of the actual next tokens in the drafter's vocabulary, int64 [n]; -1: outside.
    """
    scale = weights / weights.sum()
    annealed = min(1.0, progress / ANNEALED_UNTIL)
    total, cross_entropy, acceptance = _Distillation.apply(  # type: ignore[no-untyped-call]
        logits, target, token_indices, scale, annealed
    )
    # |p - q|_1 over all tokens is 2 (1 - sum of minima), as q is 0 outside the vocabulary.
    variation = 2.0 * (scale * (1.0 - acceptance)).sum()
    confidence = logits.new_zeros((), dtype=torch.float32)
    if confidence_logits is not None:
        # Equation 11; no gradient flows through the label.
        each = F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance.clamp(0, 1), reduction="none")
        confidence = (scale * each).sum()
        total = total + CONFIDENCE_WEIGHT * confidence
    return Losses(total, cross_entropy, variation, confidence.detach(), acceptance)


class _Distillation(torch.autograd.Function):
    """Cross entropy and match with their gradient, a few rows at a time.

    For logits z, q = softmax(z), target p (which sums to less than 1 over a reduced vocabulary) and actual token y:

        CE = -log q_y              d/dz = q - onehot(y)           (0 if y is outside the vocabulary)
        KL = -sum p log q          d/dz = q sum(p) - p            (up to a constant)
        TV = 2 (1 - sum min(p, q)) d/dz = -2 q (m - sum(q m))     with m = 1 where q < p, else 0
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: TargetDistribution, token_indices: Tensor, scale: Tensor, annealed: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        num = len(logits)
        own, divergence, acceptance = (torch.zeros(num, device=logits.device) for _ in range(3))
        gradient = torch.empty_like(logits)
        inside = token_indices >= 0
        size = _ROWS_AT_ONCE[logits.device.type]
        for part in (slice(first, first + size) for first in range(0, num, size)):
            log_q, log_p = logits[part].float().log_softmax(-1), target.log_probs(part)
            at = token_indices[part].clamp_min(0)[:, None]
            own[part] = log_q.gather(1, at).squeeze(1)
            p = log_p.exp()
            if annealed < 1.0:
                divergence[part] = -(p * log_q).sum(-1)
            q = log_q.exp_()
            acceptance[part] = torch.minimum(p, q).sum(-1)
            counted = CE_WEIGHT * inside[part].float()
            slope = counted[:, None] * q
            slope.scatter_add_(1, at, -counted[:, None])
            if annealed < 1.0:
                slope += MATCH_WEIGHT * (1.0 - annealed) * (q * p.sum(-1, keepdim=True) - p)
            if annealed > 0.0:
                below = q * (q < p)
                slope -= (2.0 * MATCH_WEIGHT * annealed) * below.sub_(q * below.sum(-1, keepdim=True))
            gradient[part] = slope.mul_(scale[part, None]).to(logits.dtype)
        ctx.save_for_backward(gradient)
        cross_entropy = -(scale * inside * own).sum()
        match = annealed * 2.0 * (scale * (1.0 - acceptance)).sum() + (1.0 - annealed) * (scale * divergence).sum()
        ctx.mark_non_differentiable(cross_entropy, acceptance)
        return CE_WEIGHT * cross_entropy + MATCH_WEIGHT * match, cross_entropy, acceptance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None


def position_weights(block_size: int) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 .. gamma: early positions matter most for the accepted length."""
    return torch.exp(-torch.arange(block_size) / block_size)
