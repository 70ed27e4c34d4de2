"""Which drafter or chain rides ahead of which request: the protocol of the policies, and what they see.

A policy is pure: pool and requests in, a chain per request out. The RouterActor calls it once a slot.
"""

from collections.abc import Mapping, Sequence
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
class PoolMember:
    """A replica of a drafter that requests can be assigned to."""

    name: str
    capacity: int  # requests it can follow at once
    cost: float  # of one draft token, relative to one-row target step; orders the pool from small to large
    healthy: bool = True  # neither down, draining nor quarantined


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live request as the router sees it. Requests with a fixed chain are not shown."""

    request_id: str
    prompt_len: int
    committed_len: int
    chain: Chain  # where it is now


@dataclass(frozen=True, slots=True)
class Observation:
    """What one drafter did for one request during the last slot, totals over ``num_rounds`` verifications."""

    request_id: str
    drafter: str
    num_rounds: int
    num_proposed: int
    num_accepted: int
    num_committed: int  # accepted and bonus tokens
    elapsed_s: float  # from commit to commit, waits for proposals included


class AssignmentPolicy(Protocol):
    """Learns from observations, assigns within capacity and only to healthy members."""

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        """A chain for every request; TARGET_ONLY where no member has room."""

    def snapshot(self) -> JsonValue:
        """What was learned that outlives the requests, for `restore`; None: nothing. Small, and bounded by the pool."""

    def restore(self, snapshot: JsonValue) -> None:
        """Learn at once what another learned before.

        Raises:
            ValueError: it is no snapshot of this policy; nothing was changed.
        """
