"""What drafters would propose of an answer, position by position, and how far it would be right.

That is all that a simulation needs to know of tokens.

Position p of an answer is that of its token p; a draft at p extends the prompt and p tokens of output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.types import Slo
from router.assignment import drafter_of

MAX_DRAFT_LEN = 64
CONFIDENCE_STEPS = 65_535  # confidences are kept as multiples of its inverse

Drafted = tuple[int, int, tuple[float, ...]]  # tokens, how many of them are right, and their confidences


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of one drafter with one answer.

    Args:
        drafted: tokens of the longest draft at each position, a byte each.
        right: how many of these are the answer's.
        confidences: (positions, longest draft) in CONFIDENCE_STEPS; or of every draft the same, in ``flat``.
        ranks: of the answer's token among the drafter's other choices at each position, if its first choice is wrong there.
    """

    drafted: bytes
    right: bytes
    confidences: NDArray[np.uint16] | None = None
    flat: tuple[float, ...] = ()
    ranks: bytes = b""

    def rank(self, position: int) -> int:
        """Of the answer's token among the drafter's other choices, from 1; 0: it is not among them, or nothing is known."""
        return self.ranks[position] if position < len(self.ranks) else 0

    def draft(self, position: int, num_tokens: int, is_right: bool = True) -> Drafted:
        """At most ``num_tokens``. On what is not the answer (``is_right`` False) nothing is right, nor behind its end."""
        at = min(position, len(self.drafted) - 1)
        num = min(self.drafted[at], num_tokens)
        right = min(self.right[at], num) if is_right and at == position else 0
        if self.confidences is None:
            return num, right, self.flat[:num]
        return num, right, tuple((self.confidences[at, :num] / CONFIDENCE_STEPS).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class AgreementAnswer:
    """An answer of ``output_len`` tokens, and the agreement of every drafter with it, by the drafter's name.

    ``inner[a, b]``: the agreement of drafter a with what drafter b would say there, for chains in which b verifies.
    """

    output_len: int
    by_drafter: Mapping[str, Agreement]
    inner: Mapping[tuple[str, str], Agreement] = field(default_factory=dict)

    def of(self, member: str) -> Agreement:
        """Of a replica of a drafter, whoever rides ahead of it: a chain drafts what its last model says."""
        return self.by_drafter[drafter_of(member)]


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRequest:
    """``max_tokens``: what was asked for; the answer may end before. ``chain``: fixed, as in `cluster.types.Request`."""

    id: str
    arrival_s: float
    prompt_len: int
    max_tokens: int
    answer: AgreementAnswer
    domain: str = ""
    chain: tuple[str, ...] | None = None
    slo: Slo = field(default_factory=Slo)

    @property
    def output_len(self) -> int:
        return min(self.max_tokens, self.answer.output_len)
