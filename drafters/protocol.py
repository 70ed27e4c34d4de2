"""What every drafter can do, alone or as part of a chain or a cascade (DESIGN idea 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cluster.messages import LevelReport
from cluster.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Demand:
    """Draft ``num_tokens`` tokens that follow the committed tokens of a request and then ``ahead``, tokens not verified yet:
    what the drafter proposed before (drafting ahead), or what its chain's verifier made of that."""

    request_id: str
    num_tokens: int
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to ``num_tokens`` tokens, none if the drafter has no idea. ``confidences`` are as in ``cluster.types.Proposal``."""

    request_id: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]


class Drafter(Protocol):
    """Proposes continuations. Not thread-safe: its loop owns it.

    Drafting never changes the output, so a drafter may be wrong, slow or gone; it may not return tokens outside the
    vocabulary. Knowing a request's sampling parameters and seed, it samples with the target's own noise (idea 1).
    """

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        """Follow a request whose committed tokens are ``token_ids``. Opening one that is followed starts it over."""

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens were committed, whatever was proposed."""

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        """One draft per demand, in their order, as one batch."""

    def release(self, request_id: str) -> None:
        """Forget a request. Unknown ones are ignored."""

    def check_integrity(self) -> None:
        """Raises AssertionError when the drafter's state disagrees with itself."""


@runtime_checkable
class Chaining(Drafter, Protocol):
    """A drafter that others can ride ahead of, for each request: what it drafts stays the same, and takes less time."""

    def lead(self, request_id: str, proposers: Sequence[str]) -> bool:
        """``proposers`` ride ahead of it for a request that it follows, smallest first, from the next draft on; () ends it.

        Returns whether they do: where it has no such proposers it drafts alone.
        """

    def take_levels(self, name: str) -> list[LevelReport]:
        """What it did since it was last asked, and so did the models below. ``name``: its own."""
