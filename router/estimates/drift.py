"""Drift detection: quarantines a drafter whose acceptance collapses, tries it again later, and takes it back. A policy
learns that a drafter got worse request by request; wrong weights or a corrupt cache must be found at once."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import log, sqrt

from router.assignment import Observation, PoolMember, drafter_of, lessons
from router.estimates.decayed import DecayedSums
from router.estimates.trial import Exploration

logger = logging.getLogger(__name__)

REMAINING = 0.1  # acceptance that counts as collapsed, as a share of the usual
QUARANTINE_S = 60.0  # until the first trial; doubles with each failure
MAX_QUARANTINE_S = 600.0
TRIAL_PLACES = 2  # concurrent requests during a trial
MAX_TRIALS = 16  # draft tokens that a request counts for: those of one text are right or wrong together
MAX_COUNTED = 4096  # requests, since there was no evidence
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
class _WatchedMember:
    exploration: Exploration
    state: DriftState = DriftState.OPEN
    evidence: float = 0.0  # Page's sum: log-likelihood ratio of a collapse to the usual, since it was least
    trial: tuple[int, int] = (0, 0)  # draft tokens of the trial, and the right ones
    counted: dict[str, int] = field(default_factory=dict)  # request -> its draft tokens in the evidence


class DriftDetector:
    """Page's cumulative sum test (1954) per member: is only the share REMAINING of its usual acceptance left?

    After QUARANTINE_S a member is tried with at most TRIAL_PLACES requests. If its acceptance exceeds the geometric
    mean of usual and collapsed, it is back. Else the quarantine doubles, and the usual rate is halved towards the observed
    one, so that a workload for which the drafter is useless does not exclude it for ever.
    """

    def __init__(self, slot_s: float) -> None:
        self._first_slots = max(1, round(QUARANTINE_S / slot_s))
        self._most_slots = max(self._first_slots, round(MAX_QUARANTINE_S / slot_s))
        self._usual: DecayedSums[str] = DecayedSums(MEMORY_TRIALS)  # by drafter: draft tokens, and the right ones
        self._members: dict[str, _WatchedMember] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ends a slot. Scores do not count, since they are of requests that other drafters were chosen for. Neither do
        rounds without a proposal in time: lateness says nothing about acceptance."""
        for member in self._members.values():
            if member.state is DriftState.QUARANTINED and member.exploration.tries():
                member.state, member.trial = DriftState.ON_TRIAL, (0, 0)
        slot: dict[str, list[Observation]] = {}
        for seen in lessons(observations):
            if seen.positions.num_reached:
                slot.setdefault(seen.drafter, []).append(seen)
        for name, of_member in slot.items():
            self._add(name, of_member)

    def judge(self, member: PoolMember) -> PoolMember:
        """The member with its drift state."""
        state = self.state(member.name)
        if state is DriftState.QUARANTINED:
            return replace(member, quarantined=True)
        return member if state is DriftState.OPEN else replace(member, capacity=min(member.capacity, TRIAL_PLACES))

    def state(self, member: str) -> DriftState:
        known = self._members.get(member)
        return DriftState.OPEN if known is None else known.state

    def _add(self, name: str, observations: Sequence[Observation]) -> None:
        drafter = drafter_of(name)
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = _WatchedMember(Exploration(self._first_slots, self._most_slots))
        tokens = [(seen.request_id, sum(seen.positions.num_reached), sum(seen.positions.num_right)) for seen in observations]
        num_tried, num_right = sum(tried for _, tried, _ in tokens), sum(right for _, _, right in tokens)
        usual_tried, usual_right = self._usual.get(drafter, 2)
        if member.state is DriftState.ON_TRIAL:
            member.trial = (member.trial[0] + num_tried, member.trial[1] + num_right)
            if member.trial[0] >= NUM_TRIAL_TOKENS:
                self._decide(name, member, member.trial[1] / member.trial[0])
        elif member.state is DriftState.OPEN:
            if usual_tried >= MIN_TRIALS and usual_right / usual_tried >= _LEAST_RATE:
                self._weigh(member, tokens, usual_right / usual_tried)
                if member.evidence > THRESHOLD:
                    logger.warning("drafter %s is quarantined: its acceptance has collapsed", name)
                    self._quarantine(member)
                    return
            if member.evidence < THRESHOLD / 4:  # a possible collapse must not become usual
                self._usual.add(drafter, (num_tried, num_right), num_tried)

    def _weigh(self, member: _WatchedMember, tokens: Sequence[tuple[str, int, int]], usual: float) -> None:
        """Adds the log-likelihood ratio of a collapse to the usual, of at most MAX_TRIALS draft tokens of each request.
        ``tokens``: request, its draft tokens and its right ones."""
        rate = min(usual, _MOST_RATE)
        of_right, of_wrong = log(REMAINING), log((1.0 - rate * REMAINING) / (1.0 - rate))
        ratio = 0.0
        for request_id, num_tried, num_right in tokens:
            former = member.counted.get(request_id, 0)
            num = min(num_tried, MAX_TRIALS - former)
            if num > 0:
                member.counted[request_id] = former + num
                ratio += (num_right * of_right + (num_tried - num_right) * of_wrong) * num / num_tried
        member.evidence = max(0.0, member.evidence + ratio)
        if not member.evidence or len(member.counted) > MAX_COUNTED:
            member.counted.clear()

    def _decide(self, name: str, member: _WatchedMember, rate: float) -> None:
        num_tried, num_right = self._usual.get(drafter_of(name), 2)
        usual = num_right / num_tried
        if rate >= usual * sqrt(REMAINING):
            logger.info("drafter %s drafts well again", name)
            del self._members[name]
            return
        self._usual.sums[drafter_of(name)] = (num_tried, num_tried * (usual + rate) / 2.0)
        self._quarantine(member)

    @staticmethod
    def _quarantine(member: _WatchedMember) -> None:
        member.state, member.evidence = DriftState.QUARANTINED, 0.0
        member.counted.clear()
