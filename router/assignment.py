"""Assignment of requests to drafters and chains: the protocol of policies and its data.

A policy is pure: pool and requests in, a chain per request out, once per slot.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

Chain = tuple[str, ...]
TARGET_ONLY: Chain = ()


def member_name(drafter: str, replica: int) -> str:
    """Name of a replica. The first has the drafter's own name; "/" occurs in no configured name."""
    return drafter if replica == 0 else f"{drafter}/{replica}"


def drafter_of(member: str) -> str:
    """The drafter of a member. Replicas draft alike, so what is learned of one holds for all."""
    return member.partition("/")[0]


@dataclass(frozen=True, slots=True)
class MemberCosts:
    """Profiled costs of a drafter."""

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
        """Whether requests may be assigned to it."""
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
    opted_out: bool = False  # gets the target alone; policies are not shown it

    @property
    def is_placeholder(self) -> bool:
        """Whether it stands for requests to come; it gets a place only after all live requests."""
        return self.committed_len == 0


@dataclass(frozen=True, slots=True)
class Positions:
    """For draft position i, given that all before it were right: how often it was reached, and how often it was right.

    A drafter that ends a draft by itself has reached the position behind it, and was wrong there. A draft that something
    else ended (its maximum length, the end of the committed tokens) has not reached it. So the counts describe the drafter's
    knowledge, however little was verified, and hold for scored drafts too. Drafts that a row price ended
    (`drafters.protocol.Demand`) are an exception: they count as if the drafter knew no more.
    """

    num_reached: tuple[int, ...] = ()
    num_right: tuple[int, ...] = ()

    def plus(self, num_right: int, failed: bool) -> "Positions":
        """One more draft: ``num_right`` right tokens, then a wrong one (``failed``) or the end of what is known."""
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
        """Without positions beyond drafts of that length."""
        if len(self.num_reached) <= draft_len:
            return self
        return Positions(self.num_reached[:draft_len], self.num_right[:draft_len])


NO_POSITIONS = Positions()


@dataclass(frozen=True, slots=True)
class Observation:
    """What one drafter did for one request during the last slot, summed over ``num_rounds`` verifications.

    Requests whose tokens say nothing about drafters yield no observations or scores (`cluster.types.Request.teaches`).
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
        """Rounds with an informative draft in time: each reaches the first position. An empty draft does not if the
        drafter was cut short or no draft was wanted.
        """
        return self.positions.num_reached[0] if self.positions.num_reached else 0

    @property
    def num_awaited(self) -> int:
        """Rounds that could have had an informative draft: not the first token of a request, its last token, or rounds
        before the drafter knows the request.
        """
        return self.num_in_time + self.num_missed


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Counterfactual counts of a drafter in step with a request that another drafts for (DESIGN idea 5).

    As exact as an observation, but without times.
    """

    request_id: str
    drafter: str
    positions: Positions


class AssignmentPolicy(Protocol):
    """Learns from observations and assigns requests within capacity to open members."""

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = ()) -> None:
        """Ends a slot. ``scores`` are of drafters that did not draft; bandits ignore them."""

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        """A chain for every request; TARGET_ONLY without a free place."""

    def snapshot(self) -> JsonValue:
        """Learned state that outlives requests, for `restore`; None if there is none. Bounded by the pool."""

    def restore(self, snapshot: JsonValue) -> None:
        """Restores a snapshot.

        Raises:
            ValueError: not a snapshot of this policy; nothing was changed.
        """


def lessons(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Observations that can be learned from."""
    return (seen for seen in observations if seen.num_rounds > 0 and seen.elapsed_s > 0.0)


class NothingLearned:
    """The learning part of policies that learn nothing."""

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = ()) -> None: ...

    def snapshot(self) -> JsonValue:
        return None

    def restore(self, snapshot: JsonValue) -> None: ...
