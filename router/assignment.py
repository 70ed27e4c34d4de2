"""Assignment of requests to drafters and chains: the protocol of policies and its data.

A policy is pure: pool and requests in, a chain per request out, once per slot.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import JsonValue

from cluster.config import DEFAULT_DRAFT_LEN, CascadeOptions, DrafterOptions
from cluster.messages import LevelReport

if TYPE_CHECKING:  # it needs numpy, which processes of lookups do without
    from router.cost_model import TableCost

Chain = tuple[str, ...]
TARGET_ONLY: Chain = ()


def member_name(drafter: str, replica: int) -> str:
    """A replica's name: the first has the drafter's own; "/" occurs in no configured name."""
    return drafter if replica == 0 else f"{drafter}/{replica}"


def drafter_of(member: str) -> str:
    """The drafter of a member. Replicas draft alike and share estimates."""
    return member.partition("/")[0]


@dataclass(frozen=True, slots=True)
class MemberCosts:
    """Profiled costs of a drafter."""

    draft_s: tuple[tuple[int, float], ...]  # (requests of the batch, seconds of its longest draft), ascending
    catch_up_s: float = 0.0  # per committed token of a request that it has not computed yet
    switch_s: float = 0.0  # per request taken up


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A replica of a drafter that requests can be assigned to."""

    name: str
    capacity: int  # requests it can follow at once
    cost: float  # of one draft token, relative to one-row target step; orders the pool from small to large
    healthy: bool = True  # linked with every target that reports
    draining: bool = False  # must be left
    quarantined: bool = False  # its acceptance has collapsed
    max_draft_len: int = 8  # tokens of its longest proposal
    costs: MemberCosts | None = None  # None: not measured
    verifies: bool = False  # can verify drafts of others in its process
    leads: bool = True  # can propose to other drafters; False: drafts in the target's process
    num_targets: int = 1  # that each have one of these in their process
    lookups: tuple[str, ...] = ()  # drafters of the pool that it queries in every round: it is as good as any of them

    @property
    def is_open(self) -> bool:
        """Whether requests may be assigned to it."""
        return self.healthy and not self.draining and not self.quarantined


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live request as the router sees it. Requests with a fixed chain are not shown. One without committed tokens stands
    for requests to come: its chain is the default."""

    request_id: str
    prompt_len: int
    committed_len: int
    chain: Chain  # where it is now
    opted_out: bool = False  # gets the target alone; policies are not shown it

    @property
    def is_placeholder(self) -> bool:
        """Stands for requests to come; seated after all live requests."""
        return self.committed_len == 0


@dataclass(frozen=True, slots=True)
class Positions:
    """Per draft position, given that all before it were right: how often it was reached, and how often right. A draft that
    its drafter ended, by itself or by a row price (`drafters.protocol.Demand`), was wrong at the position behind it; one
    ended by its maximum length or the end of the committed tokens has not reached that position. So little verification does
    not bias the counts."""

    num_reached: tuple[int, ...] = ()
    num_right: tuple[int, ...] = ()

    def plus(self, num_right: int, failed: bool) -> "Positions":
        """Adds a draft: ``num_right`` right tokens, then a wrong one (``failed``) or none."""
        reached, right = list(self.num_reached), list(self.num_right)
        count_draft(reached, right, num_right, failed)
        return Positions(tuple(reached), tuple(right))


NO_POSITIONS = Positions()


def count_draft(reached: list[int], right: list[int], num_right: int, failed: bool) -> None:
    """`Positions.plus` in place."""
    new = [0] * (num_right + failed - len(reached))
    reached += new
    right += new
    for i in range(num_right):
        reached[i] += 1
        right[i] += 1
    if failed:
        reached[num_right] += 1


@dataclass(frozen=True, slots=True)
class Observation:
    """A drafter's work for one request in the last slot, summed over ``num_rounds`` verifications. Requests that teach
    nothing (`cluster.types.Request.teaches`) yield neither observations nor scores."""

    request_id: str
    drafter: str
    num_rounds: int
    num_proposed: int
    num_accepted: int
    num_committed: int  # accepted and bonus tokens
    elapsed_s: float  # from commit to commit, waits for proposals included
    positions: Positions = NO_POSITIONS  # of drafts that were there in time; empty: none was
    num_missed: int = 0  # rounds whose draft came late, or was not requested although possible

    @property
    def num_in_time(self) -> int:
        """Rounds with an informative draft in time. An empty draft is not informative if it was cut short or not wanted."""
        return self.positions.num_reached[0] if self.positions.num_reached else 0

    @property
    def num_awaited(self) -> int:
        """Rounds that could have had a draft: not a request's first or last token, nor before the drafter knows it."""
        return self.num_in_time + self.num_missed


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Counterfactual counts of a drafter in step: as exact as an observation, without times."""

    request_id: str
    drafter: str
    positions: Positions


@dataclass(frozen=True, slots=True)
class Levels:
    """What the models within chains reported of a slot, and the target's pass times, if known."""

    reports: Sequence[LevelReport] = ()
    target: "TableCost | None" = None


NO_LEVELS = Levels()


class AssignmentPolicy(Protocol):
    """Learns from observations and assigns requests within capacity to open members."""

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        """Ends a slot. ``scores`` are of drafters that did not draft; bandits ignore them."""

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        """A chain for every request; TARGET_ONLY without a free place."""

    def snapshot(self) -> JsonValue:
        """Learned state without requests, for `restore`; None if empty."""

    def restore(self, snapshot: JsonValue) -> None:
        """Raises ValueError for a snapshot of something else; nothing is changed then."""


# The members to keep in step with requests that others draft for, and to score; of a pool and its number of requests.
Scored = Callable[[Sequence[PoolMember], int], Sequence[PoolMember]]


def nobody(pool: Sequence[PoolMember], num_requests: int) -> Sequence[PoolMember]:
    return ()


def everybody(pool: Sequence[PoolMember], num_requests: int) -> Sequence[PoolMember]:
    return pool


def without_lookups(pool: Sequence[PoolMember], num_requests: int) -> Sequence[PoolMember]:
    """The pool without the lookups of an open combination that has places for all requests: nothing is to be chosen, and
    nothing to be scored, among drafters that it queries in every round anyway."""
    found = set[str]()
    for member in pool:
        if member.lookups and member.is_open and member.capacity >= num_requests:
            found.update(member.lookups)
    return [member for member in pool if drafter_of(member.name) not in found] if found else pool


def lessons(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Observations that can be learned from."""
    return (seen for seen in observations if seen.num_rounds > 0 and seen.elapsed_s > 0.0)


class NothingLearned:
    """The learning part of policies that learn nothing."""

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None: ...

    def snapshot(self) -> JsonValue:
        return None

    def restore(self, snapshot: JsonValue) -> None: ...


# Of one draft of DEFAULT_DRAFT_LEN tokens, in one-row steps of the target.
DRAFT_STEPS = {"ngram": 0.008, "suffix": 0.016, "table": 0.008, "vllm": 0.35, "layers": 0.35, "model": 1.0}
_ON_HIDDEN_STATES = 0.15


def prior_draft_cost(options: DrafterOptions) -> float:
    """Of one draft, in one-row steps of the target; a cascade counts as its most expensive member."""
    if isinstance(options, CascadeOptions):
        return max(map(prior_draft_cost, options.members))
    return DRAFT_STEPS.get(options.kind, _ON_HIDDEN_STATES)


def prior_token_cost(options: DrafterOptions) -> float:
    """Of one draft token, as of ``PoolMember.cost``."""
    return prior_draft_cost(options) / DEFAULT_DRAFT_LEN


def prior_member_cost(options: DrafterOptions) -> float:
    """Of one draft of a cascade's member; 0 for lookups, which are queried every time."""
    return prior_draft_cost(options) if options.traits.has_model else 0.0
