"""What every drafter can do, alone or as part of a chain or a cascade (DESIGN idea 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cluster.messages import LevelReport
from cluster.types import SamplingParams

PRICE_SHARE = 0.5  # of a price: what is believed of it, and of a draft, may be off


@dataclass(frozen=True, slots=True)
class Demand:
    """Draft ``num_tokens`` tokens that follow the committed tokens of a request and then ``ahead``, tokens not verified yet:
    what the drafter proposed before (drafting ahead), or what its chain's verifier made of that.

    ``row_price``: a token that is less likely to survive than about this will not be verified, and need not be drafted.
    """

    request_id: str
    num_tokens: int
    ahead: tuple[int, ...] = ()
    row_price: float = 0.0

    @property
    def least_survival(self) -> float:
        """Where the tokens of a draft survive less often than this, it ends. Lookups keep the first, to be compared."""
        return PRICE_SHARE * self.row_price


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


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a token-by-token drafter ends a draft early: before a token of lower confidence, or after the token that makes
    the survival of the whole draft lower."""

    min_confidence: float = 0.0
    min_survival: float = 0.0


NEVER = Stopping()


@runtime_checkable
class Chaining(Drafter, Protocol):
    """A drafter that others can ride ahead of, for each request: what it drafts stays the same, and takes less time."""

    def lead(self, request_id: str, proposers: Sequence[str]) -> bool:
        """``proposers`` ride ahead of it for a request that it follows, smallest first, from the next draft on; () ends it.

        Returns whether they do: where it has no such proposers it drafts alone.
        """

    def take_levels(self, name: str) -> list[LevelReport]:
        """What it did since it was last asked, and so did the models below. ``name``: its own."""


@runtime_checkable
class Foreseeing(Drafter, Protocol):
    """A drafter that goes token by token, and so says in one pass what it would have drafted behind each of several."""

    @property
    def stopping(self) -> Stopping: ...

    def foresee(self, demands: Sequence[Demand], max_rows: int) -> list[Draft | None]:
        """What it would draft in the place of each token of ``ahead``, given those before it: it is told of them next.

        One pass of about ``max_rows`` rows at the most, which takes no cache from anybody. None: it is not in step yet, a
        part of what is missing was computed. Fewer tokens than ``ahead``: it cannot say.
        """
