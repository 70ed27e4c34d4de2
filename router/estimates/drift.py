"""Drift detection: quarantines a drafter whose acceptance collapses, tries it again later, and takes it back.

A policy learns that a drafter got worse request by request. A replica that drafts nonsense (other weights, a corrupt cache)
must be found at once, and reported.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import exp, log, sqrt

from cluster.config import CollapseConfig
from router.assignment import Observation, PoolMember, drafter_of, lessons

logger = logging.getLogger(__name__)

MAX_TRIALS = 16  # draft tokens that a request counts for: those of one text are right or wrong together
MAX_HEARD = 4096  # requests, since there was no evidence
MIN_TRIALS = 200.0  # before it is known what is usual for a drafter
MEMORY_TRIALS = 4000.0  # that what is usual remembers
THRESHOLD = 60.0  # of the sum of log-likelihood ratios: five requests of which nothing was right, where 0.6 is usual
NUM_TRIAL_TOKENS = 64.0  # that decide whether a drafter comes back
_LEAST_RATE = 0.05  # under which nothing can collapse
_MOST_RATE = 0.98


class DriftState(Enum):
    OPEN = auto()
    QUARANTINED = auto()
    ON_TRIAL = auto()  # a few requests may be with it


@dataclass(slots=True)
class UsualAcceptance:
    """Share of right draft tokens of a drafter over all its replicas: decayed sums."""

    num_tried: float = 0.0
    num_right: float = 0.0

    @property
    def rate(self) -> float:
        return self.num_right / self.num_tried

    def add(self, num_tried: float, num_right: float) -> None:
        kept = exp(-num_tried / MEMORY_TRIALS)
        self.num_tried = self.num_tried * kept + num_tried
        self.num_right = self.num_right * kept + num_right

    def come_to(self, rate: float) -> None:
        """Moves half way to a rate, so that a lasting change becomes usual."""
        self.num_right = self.num_tried * (self.rate + rate) / 2.0


@dataclass(frozen=True, slots=True)
class _Drafted:
    """Draft tokens of a request in a slot."""

    request_id: str
    num_tried: int
    num_right: int


def _drafted(seen: Observation) -> _Drafted | None:
    """None where no proposal came in time: lateness is the planner's concern and says nothing about acceptance."""
    reached, right = seen.positions.num_reached, seen.positions.num_right
    return _Drafted(seen.request_id, sum(reached), sum(right)) if reached else None


@dataclass(slots=True)
class _WatchedMember:
    standing: DriftState = DriftState.OPEN
    evidence: float = 0.0  # Page's sum: how much likelier the collapse than the usual, since it was least so
    num_out: int = 0  # slots of the quarantine that are left
    length: int = 0  # slots of the last quarantine
    trial: UsualAcceptance = field(default_factory=UsualAcceptance)
    heard: dict[str, int] = field(default_factory=dict)  # request -> its draft tokens that the evidence counts


class DriftDetector:
    """Page's cumulative sum test (1954) per member: is only the share ``remaining`` of its usual acceptance left?

    After ``quarantine_s`` a member is tried with at most ``trial_places`` requests. If its acceptance exceeds the geometric
    mean of usual and collapsed, it is back; else it is quarantined for twice as long, and the usual rate comes half way
    down, so that a workload for which the drafter is useless does not exclude it for ever.
    """

    def __init__(self, config: CollapseConfig, slot_s: float) -> None:
        self._config = config
        self._first_slots = max(1, round(config.quarantine_s / slot_s))
        self._most_slots = max(self._first_slots, round(config.max_quarantine_s / slot_s))
        self._usual: dict[str, UsualAcceptance] = {}
        self._members: dict[str, _WatchedMember] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ends a slot. Scores do not count, since they are of requests that other drafters were chosen for."""
        for member in self._members.values():
            if member.standing is DriftState.QUARANTINED:
                member.num_out -= 1
                if member.num_out <= 0:
                    member.standing, member.trial = DriftState.ON_TRIAL, UsualAcceptance()
        slot: dict[str, list[_Drafted]] = {}
        for seen in lessons(observations):
            drafted = _drafted(seen)
            if drafted is not None:
                slot.setdefault(seen.drafter, []).append(drafted)
        for name, of_member in slot.items():
            self._add(name, of_member)

    def judge(self, member: PoolMember) -> PoolMember:
        """The member with its drift state."""
        known = self._members.get(member.name)
        if known is None or known.standing is DriftState.OPEN:
            return member
        if known.standing is DriftState.QUARANTINED:
            return replace(member, quarantined=True)
        return replace(member, capacity=min(member.capacity, self._config.trial_places))

    def standing(self, member: str) -> DriftState:
        known = self._members.get(member)
        return DriftState.OPEN if known is None else known.standing

    def _add(self, name: str, drafted: Sequence[_Drafted]) -> None:
        usual = self._usual.setdefault(drafter_of(name), UsualAcceptance())
        member = self._members.setdefault(name, _WatchedMember())
        num_tried, num_right = sum(one.num_tried for one in drafted), sum(one.num_right for one in drafted)
        if member.standing is DriftState.ON_TRIAL:
            member.trial.add(num_tried, num_right)
            if member.trial.num_tried >= NUM_TRIAL_TOKENS:
                self._decide(name, member, usual)
        elif member.standing is DriftState.OPEN:
            if usual.num_tried >= MIN_TRIALS and usual.rate >= _LEAST_RATE:
                self._weigh(member, drafted, usual.rate)
                if member.evidence > THRESHOLD:
                    logger.warning(
                        "drafter %s: next to nothing of what it drafts is right any more, it is quarantined", name
                    )
                    self._put_out(member, self._first_slots)
                    return
            if member.evidence < THRESHOLD / 4:  # what may be a collapse is not made usual
                usual.add(num_tried, num_right)

    def _weigh(self, member: _WatchedMember, drafted: Sequence[_Drafted], usual: float) -> None:
        """Adds the log-likelihood ratio of a collapse to the usual, of the requests that have not yet had their say."""
        rate = min(usual, _MOST_RATE)
        of_right, of_wrong = log(self._config.remaining), log((1.0 - rate * self._config.remaining) / (1.0 - rate))
        ratio = 0.0
        for one in drafted:
            heard = member.heard.get(one.request_id, 0)
            counted = min(one.num_tried, MAX_TRIALS - heard)
            if counted > 0:
                member.heard[one.request_id] = heard + counted
                ratio += (one.num_right * of_right + (one.num_tried - one.num_right) * of_wrong) * counted / one.num_tried
        member.evidence = max(0.0, member.evidence + ratio)
        if not member.evidence or len(member.heard) > MAX_HEARD:
            member.heard.clear()

    def _decide(self, name: str, member: _WatchedMember, usual: UsualAcceptance) -> None:
        if member.trial.rate >= usual.rate * sqrt(self._config.remaining):
            logger.info("drafter %s drafts well again", name)
            self._members[name] = _WatchedMember()
            return
        usual.come_to(member.trial.rate)
        self._put_out(member, min(2 * member.length, self._most_slots))

    @staticmethod
    def _put_out(member: _WatchedMember, num_slots: int) -> None:
        member.standing, member.evidence = DriftState.QUARANTINED, 0.0
        member.heard.clear()
        member.num_out = member.length = num_slots
