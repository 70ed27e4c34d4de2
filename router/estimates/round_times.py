"""Seconds of a round if all requests were with one drafter.

The requests of a target share its passes, and prompts lengthen rounds more than drafting does, so means per drafter mislead.
Instead

    T_j = shortest + s_j d_j + (M_j - base - s_j d_j) max(0, 1 - (3 e_j / (M_j - base - s_j d_j))^2)

- d_j: profiled seconds of a batch of j's drafts for all requests; s_j: share of rounds with a draft.
- M_j: mean of j's rounds; e_j: its standard error. A deviation from the profile counts as far as it exceeds chance.
- base: mean round without drafts; shortest: mean of the shortest slots, which had no prompts.

The profiled time of drafting in the target's process is charged to these drafters alone.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import JsonValue

from router.assignment import Observation, PoolMember, drafter_of
from router.drafter.matching import Floats
from router.estimates.decayed import DecayedSums, Key
from router.estimates.draft_times import profiled_s

MEMORY_SLOTS = 400.0  # of rounds, after which what they took counts 1/e
_RECENT_SLOTS = 64  # of which the shortest tell what a round takes without prompts
_SHORTEST = 0.1  # of them
_NUM_ERRORS = 3.0  # standard errors, that a mean must be off to be significant_share
_FORGOTTEN = 1e-3  # slots


class Rounds(NamedTuple):
    """Decayed sums over the slots of a drafter or chain."""

    num_slots: float
    num_rounds: float
    seconds: float
    squares: float  # of a slot's seconds, over its rounds

    @property
    def mean_s(self) -> float:
        return self.seconds / self.num_rounds

    @property
    def residue(self) -> float:
        """Squared deviation of slots from the mean, over their rounds."""
        return max(0.0, self.squares - self.mean_s * self.seconds)


class SlotSums(DecayedSums[Key]):
    """The sums of ``Rounds`` by key, which fade with each slot."""

    def __init__(self) -> None:
        super().__init__(MEMORY_SLOTS)

    def end_slot(self, new: Mapping[Key, tuple[float, float]]) -> None:
        """Adds the (rounds, seconds) of a slot."""
        self.fade(1.0, _FORGOTTEN)
        for key, (num_rounds, seconds) in new.items():
            self.add(key, (1.0, num_rounds, seconds, seconds**2 / num_rounds), 0.0)


class RoundTimes:
    """Round times by drafter. Slots without observations do not count."""

    def __init__(self) -> None:
        self._rounds: SlotSums[str] = SlotSums()
        self._bases: deque[float] = deque(maxlen=_RECENT_SLOTS)
        self._members: Mapping[str, PoolMember] = {}
        self._copies: Mapping[str, int] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ends a slot."""
        if not observations:
            return
        rounds, drafted, seconds = Counter[str](), Counter[str](), defaultdict[str, float](float)
        for seen in observations:
            drafter = drafter_of(seen.drafter)
            rounds[drafter] += seen.num_rounds
            seconds[drafter] += seen.elapsed_s
            drafted[drafter] += seen.num_in_time
        total = rounds.total()
        num_requests = _concurrency(observations)
        shared_s = waits_s = 0.0
        for drafter, num in drafted.items():
            member = self._members.get(drafter)
            if member is not None:
                draft_s = self._draft_s(member, num_requests * num / total)
                if shares_target(member):
                    shared_s += draft_s
                else:
                    waits_s += draft_s * num / total
        mean_s = sum(seconds.values()) / total
        shared_s = min(shared_s, mean_s / 2)
        self._bases.append(max(mean_s - shared_s - waits_s, mean_s / 2))
        self._rounds.end_slot(
            {drafter: (num, seconds[drafter] - min(num * shared_s, seconds[drafter] / 2)) for drafter, num in rounds.items()}
        )

    def snapshot(self) -> dict[str, JsonValue]:
        return self._rounds.snapshot()

    def restore(self, snapshot: Mapping[str, tuple[float, ...]]) -> None:
        """The time of rounds without prompts is learned again."""
        self._bases.clear()
        self._rounds.sums = dict(snapshot)

    def of(
        self, members: Sequence[PoolMember], copies: Sequence[int], shares: Floats, users: Floats, num_requests: int
    ) -> Floats:
        """Seconds of a round with each drafter; in units of a plain round where nothing was measured. ``copies``: replicas
        that draft at once. ``shares``: of rounds with a draft. ``users``: requests with each, of ``num_requests``, which
        share the time of a drafter in the target's process."""
        names = [drafter_of(member.name) for member in members]
        self._members, self._copies = dict(zip(names, members, strict=True)), dict(zip(names, copies, strict=True))
        known = [None if (sums := self._rounds.sums.get(name)) is None else Rounds(*sums) for name in names]
        own = np.array([shares_target(member) for member in members])
        counts = np.array([0.0 if one is None else one.num_rounds for one in known])
        means = np.array([0.0 if one is None else one.mean_s for one in known])
        mean_s = float(counts @ means / counts.sum()) if counts.any() else 0.0
        drafts_s = np.array([self._draft_s(member, num) for member, num in zip(members, users.tolist(), strict=True)])
        in_s = shares * drafts_s * np.where(own, num_requests / users, 1.0)
        # A profile that does not know a drafter knows what share of a round its kind takes.
        in_rounds = shares * [0.0 if _is_measured(member) else member.cost * member.max_draft_len for member in members]
        if not counts.any():
            unmeasured: Floats = _step_s(members) * (1.0 + in_rounds) + in_s
            return unmeasured
        waited = np.where(own, 0.0, counts)
        base_s = (counts @ means - waited @ in_s) / (counts.sum() + waited @ in_rounds)
        base_s = max(base_s, mean_s / 2)
        drafting_s = in_s + base_s * in_rounds
        off = np.where(counts > 0.0, means - base_s - np.where(own, 0.0, drafting_s), 0.0)
        shortest_s = min(base_s, float(np.quantile(self._bases, _SHORTEST))) if self._bases else base_s
        found: Floats = np.maximum(shortest_s + drafting_s + off * significant_share(off, known), shortest_s / 4)
        return found

    def _draft_s(self, member: PoolMember, num_requests: float) -> float:
        """Profiled seconds of a batch of drafts for so many requests on all copies; 0 if not profiled."""
        return profiled_s(member.costs, min(num_requests / self._copies[drafter_of(member.name)], member.capacity))


def significant_share(off: Floats, known: Sequence[Rounds | None]) -> Floats:
    """Share of the deviation ``off`` that counts: 0 where it may be chance or nothing is known."""
    some = [one for one in known if one is not None]
    num_free = sum(one.num_slots for one in some) - len(some)
    per_round = sum(one.residue for one in some) / num_free if num_free >= 1.0 else np.inf
    errors = np.array([0.0 if one is None else per_round / one.num_rounds for one in known])  # squared, of the means
    shares: Floats = np.maximum(0.0, 1.0 - _NUM_ERRORS**2 * errors / np.maximum(off**2, 1e-300))
    shares *= np.minimum(1.0, [0.0 if one is None else one.num_slots for one in known])
    return shares


def _concurrency(observations: Sequence[Observation]) -> float:
    """Mean number of concurrent requests in the slot."""
    elapsed_s = defaultdict[str, float](float)
    for seen in observations:
        elapsed_s[seen.request_id] += seen.elapsed_s
    longest_s = max(elapsed_s.values())
    return sum(elapsed_s.values()) / longest_s if longest_s > 0.0 else float(len(elapsed_s))


def shares_target(member: PoolMember) -> bool:
    """Whether its profiled drafts take time from all rounds."""
    return not member.leads and _is_measured(member)


def _is_measured(member: PoolMember) -> bool:
    return member.costs is not None and bool(member.costs.draft_s)


def _step_s(members: Sequence[PoolMember]) -> float:
    """Seconds of a plain step, from drafters profiled both in seconds and in steps; 1 if there are none."""
    for one in members:
        if one.costs and one.costs.draft_s and one.costs.draft_s[0][1] > 0.0 and one.cost > 0.0:
            return one.costs.draft_s[0][1] / (one.cost * one.max_draft_len)
    return 1.0
