"""The interface of drafters, alone or as part of a chain or cascade (docs/architecture.md#principles)."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from cluster.messages import LevelReport
from cluster.sampling_params import SamplingParams
from cluster.types import NO_DRAFTS, DraftTerms

if TYPE_CHECKING:
    from drafters.native.lookup import NativeLookup


@dataclass(frozen=True, slots=True)
class Demand:
    """Up to ``num_tokens`` draft tokens are wanted after the committed tokens of a request and ``ahead``."""

    request_id: str
    num_tokens: int
    ahead: tuple[int, ...] = ()  # unverified: proposed before (drafting ahead), or chosen by the chain's verifier
    terms: DraftTerms = NO_DRAFTS  # when it ends; ``num_tokens`` of this, which is never more, bounds it
    survival: float = 1.0  # of ``ahead``, as far as it is not proposed yet
    num_runners_up: int = 0  # of each token; only of a drafter that forks


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to ``num_tokens`` tokens, possibly none. ``confidences`` as in ``cluster.types.Proposal``."""

    request_id: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    runners_up: tuple[
        tuple[int, ...], ...
    ] = ()  # at each token, on demand: what it would have drafted next to it, best first


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a drafter can do beyond ``Drafter``; None: it cannot. A wrapper states those of the drafter in it."""

    token_by_token: "TokenByToken | None" = None
    chain: "ChainVerifier | None" = None
    lookup: "NativeLookup | None" = None  # its implementation in C: several of them are queried in one call
    forks: "Forks | None" = None
    distributions: "Distributions | None" = None
    stops: bool = False  # it applies ``Demand.terms`` at each draft token; the loop cuts the drafts of others


def salt_key(salt: str) -> int:
    """64 bits for a salt; 0 for none."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little") if salt else 0


class Drafter(Protocol):
    """Proposes continuations. Not thread-safe.

    It may be wrong, slow or gone, but must not return tokens outside the vocabulary. With a request's sampling parameters
    and seed it samples with the target's noise.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        """Follows a request with committed tokens ``token_ids``. Reopening a followed request resets it. What is learned of
        its text, or cached, serves only requests with the same salt."""

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Appends committed tokens."""

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        """One draft per demand, in their order, as one batch."""

    def release(self, request_id: str) -> None:
        """Forgets a request. Unknown ones are ignored."""

    def check_integrity(self) -> None:
        """Raises AssertionError if the drafter's state is inconsistent."""


class TokenByToken(Protocol):
    """One pass over several tokens yields what the drafter would have drafted at each of them."""

    @property
    def min_survival(self) -> float:
        """A draft ends after the token that takes its survival below this."""

    def choose_at_each(self, demands: Sequence[Demand], max_rows: int) -> list[Draft | None]:
        """What it would draft in place of each token of ``ahead``; ``extend`` with them follows.

        One pass of about ``max_rows`` rows at most, which evicts no cache. None: only part of the missing tokens was
        computed. Fewer tokens than ``ahead``: no answer is possible.
        """


class Forks(Protocol):
    """Follows a request along several continuations at once, as branches with names of their own."""

    def fork(self, request_id: str, branch_id: str, ahead: Sequence[int], num_more: int) -> bool:
        """Follows a request as ``branch_id``, too, for demands of up to ``num_more`` tokens after ``ahead``. Returns whether
        there is room without taking it from others. ``Drafter.release`` ends a branch; it must end before its request is
        opened anew or released."""

    def adopt(self, request_id: str, branch_id: str) -> None:
        """The request, extended by what the branch assumed, goes on with the branch's cache. The branch ends."""


class Distributions(Protocol):
    """Tells what its drafts are chosen from."""

    def propose_watched(self, demands: Sequence[Demand], request_id: str) -> tuple[list[Draft], Any]:
        """As ``Drafter.propose``, with the distributions before each token drafted for ``request_id``, a tensor [tokens,
        vocab]. None: it has no draft."""


class ChainVerifier(Protocol):
    """Verifies proposals of smaller drafters, per request. Its drafts stay the same and take less time."""

    def set_proposers(self, request_id: str, proposers: Sequence[str]) -> bool:
        """Sets the proposers of a followed request, smallest first, from the next draft on; () removes them. Returns whether
        it has these proposers; if not, it drafts alone."""

    def take_levels(self, name: str) -> list[LevelReport]:
        """Reports of this drafter, named ``name``, and of the models below since the last call."""
