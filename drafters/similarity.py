"""SimScore of two models of a chain by their distributions (SpecRouter, equations 5 and 6), where both are in this process.

    DTV(p, q) = 1/2 sum over v of |p(v) - q(v)|        SimScore = 1 - E[DTV] = E[sum over v of min(p(v), q(v))]

p is the proposer's distribution before a token that it proposes, q the verifier's there, both at the request's temperature,
1 for greedy ones, before penalties and filters. A sample is one request of a round. It costs a softmax per model and token,
0.4 ms of a core for four of 49,152 logits (avx512_bf16); what it finds comes to the host with the choices of the verifier's
pass, so nothing waits for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device import begin_to_host

EAGER_ROUNDS = 16  # of a proposer, each of which is sampled
PERIOD = 32  # later rounds from one sample to the next


class SampledRounds:
    """Which rounds of a proposer are compared."""

    def __init__(self) -> None:
        self._num_rounds = self._num_sampled = 0

    def next(self, num_requests: int) -> int | None:
        """Index of the request of the next round that is compared, another each time. None: none."""
        is_sampled = self._num_rounds < EAGER_ROUNDS or self._num_rounds % PERIOD == 0
        self._num_rounds += 1
        self._num_sampled += is_sampled
        return self._num_sampled % num_requests if is_sampled else None


class DistributionRows:
    """Distributions before the tokens of a draft under construction, [rows, vocab] of each pass."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def note(self, rows: Tensor) -> None:
        self._parts.append(rows)

    def keep(self, num_rows: int) -> None:
        """Of the rows noted last, only the first ``num_rows`` were drafted from."""
        if self._parts:
            self._parts[-1] = self._parts[-1][:num_rows]

    def all(self) -> Tensor | None:
        return torch.cat(self._parts) if self._parts else None


class Comparison:
    """Of one draft with its verification. ``proposed``: the proposer's distributions, [tokens, vocab]."""

    def __init__(self, proposed: Tensor) -> None:
        self._proposed = proposed
        self._overlaps: Tensor | None = None  # [tokens], on their way to the host

    def note(self, rows: Tensor) -> None:
        """The verifier's, before it waits for its choices."""
        num = min(len(rows), len(self._proposed))
        if rows.device == self._proposed.device:
            self._overlaps = begin_to_host(overlaps(self._proposed[:num], rows[:num]))

    def found(self, num_reached: int) -> Sequence[float]:
        """1 - DTV at the first ``num_reached`` tokens, after the wait for the choices."""
        return () if self._overlaps is None else self._overlaps[:num_reached].tolist()


def overlaps(p: Tensor, q: Tensor) -> Tensor:
    """1 - DTV of each row. Tokens that only one of the vocabularies has are never in common."""
    width = min(p.shape[-1], q.shape[-1])
    return torch.minimum(p[:, :width], q[:, :width]).sum(-1).clamp(max=1.0)
