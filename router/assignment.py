"""Which drafter or chain rides ahead of which request: the protocol of the policies, and what they see.

A policy is pure: pool and requests in, a chain per request out. The RouterActor calls it once a slot.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

Chain = tuple[str, ...]
TARGET_ONLY: Chain = ()


def member_name(drafter: str, replica: int) -> str:
    """Of one replica of a drafter. The first bears the drafter's own name; "/" stands in no configured name."""
    return drafter if replica == 0 else f"{drafter}/{replica}"


def drafter_of(member: str) -> str:
    """The drafter that a member is a replica of. Replicas propose alike, so what is learned of one holds for all."""
    return member.partition("/")[0]


@dataclass(frozen=True, slots=True)
class MemberCosts:
    """What a profile measured of a drafter."""

    draft_s: tuple[tuple[int, float], ...]  # (requests of the batch, seconds of its longest draft), ascending
    catch_up_s: float = 0.0  # per committed token of a request that it has not computed yet
    switch_s: float = 0.0  # of taking up a request, whatever its length


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A replica of a drafter that requests can be assigned to."""

    name: str
    capacity: int  # requests it can follow at once
    cost: float  # of one draft token, relative to one-row target step; orders the pool from small to large
    healthy: bool = True  # linked with every target that reports
    draining: bool = False  # is to be left
    quarantined: bool = False  # what it drafts has become worthless
    max_draft_len: int = 8  # tokens of its longest proposal
    costs: MemberCosts | None = None  # None: not measured
    verifies: bool = False  # others can ride ahead of it, in its process
    leads: bool = True  # it can ride ahead of others; one that cannot drafts in the target's own process
    num_targets: int = 1  # that each have one of these in their process

    @property
    def is_open(self) -> bool:
        """Whether requests may be with it."""
        return self.healthy and not self.draining and not self.quarantined


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live request as the router sees it. Requests with a fixed chain are not shown.

    One with nothing committed stands for requests to come: the chain chosen for it is the default.
    """

    request_id: str
    prompt_len: int
    committed_len: int
    chain: Chain  # where it is now
    features: tuple[float, ...] = ()  # of the prompt (`router.prompt_features`); (): not known
    opted_out: bool = False  # it wants the target alone

    @property
    def is_placeholder(self) -> bool:
        """It stands for requests to come, and gets a place that no live request has a use for."""
        return self.committed_len == 0


@dataclass(frozen=True, slots=True)
class Positions:
    """Of draft position i, all before it having been right: how often it was reached, and how often it was right.

    A drafter that ends a draft of its own accord has reached the position behind it, and was not right there; where
    something else ended it (the longest draft, the end of what was committed) the position was not reached. So it says what
    a drafter knows, however little of that was verified, and holds alike for one that was only scored. Not so of one that
    was told what a row costs (`drafters.protocol.Demand`) and ends its drafts by that: it passes for one that knows no more.
    """

    num_reached: tuple[int, ...] = ()
    num_right: tuple[int, ...] = ()

    def plus(self, num_right: int, failed: bool) -> "Positions":
        """One draft more: ``num_right`` tokens right, and then one that was not, or only the end of what is known."""
        reached, right = list(self.num_reached), list(self.num_right)
        new = [0] * (num_right + failed - len(reached))
        reached += new
        right += new
        for i in range(num_right):
            reached[i] += 1
            right[i] += 1
        if failed:
            reached[num_right] += 1
        return Positions(tuple(reached), tuple(right))

    def up_to(self, draft_len: int) -> "Positions":
        """Without those that no draft of so many tokens reaches."""
        if len(self.num_reached) <= draft_len:
            return self
        return Positions(self.num_reached[:draft_len], self.num_right[:draft_len])


NO_POSITIONS = Positions()


@dataclass(frozen=True, slots=True)
class Observation:
    """What one drafter did for one request during the last slot, totals over ``num_rounds`` verifications.

    Of a request whose tokens say nothing of drafters there are none, nor scores (`cluster.types.Request.teaches`).
    """

    request_id: str
    drafter: str
    num_rounds: int
    num_proposed: int
    num_accepted: int
    num_committed: int  # accepted and bonus tokens
    elapsed_s: float  # from commit to commit, waits for proposals included
    positions: Positions = NO_POSITIONS  # of drafts that were there in time; empty: none was
    num_missed: int = 0  # rounds that a draft could have been there for and was not: it came late, or was not asked for

    @property
    def num_in_time(self) -> int:
        """Rounds in which a draft was at hand that told something: each reaches the first position. An empty one does not
        where the drafter had only been cut short, or no draft was wanted."""
        return self.positions.num_reached[0] if self.positions.num_reached else 0

    @property
    def num_awaited(self) -> int:
        """Rounds that a draft could have been there for: not a request's first token, its last alone, what comes before a
        drafter has been told of the request, nor a round whose draft told nothing."""
        return self.num_in_time + self.num_missed


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Counterfactual: what a drafter in step with a request would have drafted where others did (DESIGN idea 5).

    As exact as an observation; only how long it would have taken, it does not say.
    """

    request_id: str
    drafter: str
    positions: Positions


class AssignmentPolicy(Protocol):
    """Learns from observations, assigns within capacity and only to members that are open; lets those be that opted out."""

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = ()) -> None:
        """What the last slot showed. ``scores`` are of drafters that did not draft; a bandit has no use for them."""

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        """A chain for every request; TARGET_ONLY where no member has room."""

    def snapshot(self) -> JsonValue:
        """What was learned that outlives the requests, for `restore`; None: nothing. Small, and bounded by the pool."""

    def restore(self, snapshot: JsonValue) -> None:
        """Learn at once what another learned before.

        Raises:
            ValueError: it is no snapshot of this policy; nothing was changed.
        """


def lessons(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Those that something can be learned of: time of all, what drafts are worth of those whose ``positions`` say it."""
    return (seen for seen in observations if seen.num_rounds > 0 and seen.elapsed_s > 0.0)


def opted_out(requests: Iterable[RequestView]) -> dict[str, Chain]:
    """The chains of those who want none."""
    return {request.request_id: TARGET_ONLY for request in requests if request.opted_out}
