"""How long a round would take if all requests were with a drafter.

The requests of a target share its passes. What a request sees of a slow drafter, the others see, too; and by chance, above
all by the prompts that were computed meanwhile, rounds with one drafter differ from rounds with its like by more than drafts
take. Who compares the mean rounds of drafters as they are is misled by both. Hence

    T_j = shortest + s_j d_j + (M_j - base - s_j d_j) max(0, 1 - (3 e_j / (M_j - base - s_j d_j))^2)

d_j: of a batch of j's drafts for all requests, as the profile says. s_j: the share of rounds with one. M_j: the mean of the
rounds with j, and e_j its standard error, from how slots differ: what was measured counts instead of the profile as far as
it is off by more than chance. Time that drafters took in the target's own process is in the rounds of all; so what each slot
had of it, by the profile, is taken off them, and counts for these drafters alone: theirs are then M_j - base for what the
profile is off by, and d_j of who would be with j for what j takes. base: the mean round without drafts;
shortest: that of the slots that had the shortest, for what prompts take is no part of what is chosen.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from router.assignment import Observation, PoolMember, drafter_of
from router.matching import Floats

MEMORY_SLOTS = 400.0  # of rounds, after which what they took counts 1/e
_RECENT_SLOTS = 64  # of which the shortest tell what a round takes without prompts
_SHORTEST = 0.1  # of them
_CERTAIN = 3.0  # standard errors, that a mean must be off to be believed
FORGOTTEN = 1e-3  # slots

Sums = tuple[float, float, float, float]  # of a drafter: slots, rounds, seconds, and their squares over the rounds


@dataclass(slots=True)
class Rounds:
    """Fading sums over the slots that a drafter, or a chain, was seen in."""

    num_slots: float = 0.0
    num_rounds: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of a slot's seconds, over its rounds

    def fade(self, kept: float) -> None:
        self.num_slots *= kept
        self.num_rounds *= kept
        self.seconds *= kept
        self.squares *= kept

    def add(self, num_rounds: float, seconds: float) -> None:
        self.num_slots += 1.0
        self.num_rounds += num_rounds
        self.seconds += seconds
        self.squares += seconds**2 / num_rounds

    @property
    def mean_s(self) -> float:
        return self.seconds / self.num_rounds

    @property
    def residue(self) -> float:
        """Squares of what slots took above or below the mean, over their rounds."""
        return max(0.0, self.squares - self.mean_s * self.seconds)


class RoundTimes:
    """By drafter. Slots in which nothing was observed do not count."""

    def __init__(self) -> None:
        self._rounds: dict[str, Rounds] = {}
        self._bases: deque[float] = deque(maxlen=_RECENT_SLOTS)
        self._members: Mapping[str, PoolMember] = {}
        self._copies: Mapping[str, int] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        """A slot."""
        if not observations:
            return
        rounds: dict[str, int] = {}
        seconds: dict[str, float] = {}
        drafted: dict[str, int] = {}
        for seen in observations:
            drafter = drafter_of(seen.drafter)
            rounds[drafter] = rounds.get(drafter, 0) + seen.num_rounds
            seconds[drafter] = seconds.get(drafter, 0.0) + seen.elapsed_s
            drafted[drafter] = drafted.get(drafter, 0) + seen.num_in_time
        total = sum(rounds.values())
        num_requests = _at_once(observations)
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
        for known in self._rounds.values():
            known.fade(exp(-1.0 / MEMORY_SLOTS))
        for drafter, num in rounds.items():
            taken_s = min(num * shared_s, seconds[drafter] / 2)
            self._rounds.setdefault(drafter, Rounds()).add(num, seconds[drafter] - taken_s)
        self._rounds = {drafter: known for drafter, known in self._rounds.items() if known.num_slots >= FORGOTTEN}

    def snapshot(self) -> dict[str, Sums]:
        return {drafter: (r.num_slots, r.num_rounds, r.seconds, r.squares) for drafter, r in self._rounds.items()}

    def restore(self, snapshot: Mapping[str, Sums]) -> None:
        """How long rounds take without prompts is learned anew."""
        self._bases.clear()
        self._rounds = {drafter: Rounds(*sums) for drafter, sums in snapshot.items()}

    def of(
        self, members: Sequence[PoolMember], copies: Sequence[int], shares: Floats, users: Floats, num_requests: int
    ) -> Floats:
        """Seconds of a round with each; rounds of the target alone where nothing was measured at all.

        Args:
            copies: of each, how many draft at once.
            shares: of rounds that have a draft, of each.
            users: requests that would be with each, of ``num_requests``; between them they bear what its drafts take of the
                rounds of all, if it drafts in the target's process.
        """
        names = [drafter_of(member.name) for member in members]
        self._members, self._copies = dict(zip(names, members, strict=True)), dict(zip(names, copies, strict=True))
        known = [self._rounds.get(name) for name in names]
        own = np.array([shares_target(member) for member in members])
        counts = np.array([0.0 if one is None else one.num_rounds for one in known])
        means = np.array([0.0 if one is None else one.mean_s for one in known])
        mean_s = float(counts @ means / counts.sum()) if counts.any() else 0.0
        drafts_s = np.array([self._draft_s(member, num) for member, num in zip(members, users.tolist(), strict=True)])
        in_s = shares * drafts_s * np.where(own, num_requests / users, 1.0)
        # A profile that does not know a drafter knows what share of a round its kind takes.
        in_rounds = shares * np.array([0.0 if _is_measured(member) else _in_rounds(member) for member in members])
        if not counts.any():
            unmeasured: Floats = _step_s(members) * (1.0 + in_rounds) + in_s
            return unmeasured
        waited = np.where(own, 0.0, counts)
        base_s = (counts @ means - waited @ in_s) / (counts.sum() + waited @ in_rounds)
        base_s = max(base_s, mean_s / 2)
        drafting_s = in_s + base_s * in_rounds
        off = np.where(counts > 0.0, means - base_s - np.where(own, 0.0, drafting_s), 0.0)
        shortest_s = min(base_s, float(np.quantile(self._bases, _SHORTEST))) if self._bases else base_s
        found: Floats = np.maximum(shortest_s + drafting_s + off * believed(off, known), shortest_s / 4)
        return found

    def _draft_s(self, member: PoolMember, num_requests: float) -> float:
        """Of a batch of drafts for so many requests with all its copies, as the profile says; 0: it says nothing."""
        if member.costs is None or not member.costs.draft_s:
            return 0.0
        num = min(num_requests / self._copies[drafter_of(member.name)], member.capacity)
        batches, seconds = zip(*member.costs.draft_s, strict=True)
        return float(np.interp(num, batches, seconds)) * min(1.0, num)


def believed(off: Floats, known: Sequence[Rounds | None]) -> Floats:
    """What share of ``off``, by which the means are off, counts: 0 where it may be chance, or nothing is known."""
    shares: Floats = np.maximum(0.0, 1.0 - _CERTAIN**2 * _errors(known) / np.maximum(off**2, 1e-300))
    shares *= np.minimum(1.0, [0.0 if one is None else one.num_slots for one in known])
    return shares


def _errors(known: Sequence[Rounds | None]) -> Floats:
    """Of the mean of each, squared; from one slot nobody can tell."""
    some = [one for one in known if one is not None]
    num_free = sum(one.num_slots for one in some) - len(some)
    per_round = sum(one.residue for one in some) / num_free if num_free >= 1.0 else np.inf
    return np.array([0.0 if one is None else per_round / one.num_rounds for one in known])


def _at_once(observations: Sequence[Observation]) -> float:
    """Requests that were served at a time: in a slot some come and others end."""
    elapsed_s: dict[str, float] = {}
    for seen in observations:
        elapsed_s[seen.request_id] = elapsed_s.get(seen.request_id, 0.0) + seen.elapsed_s
    longest_s = max(elapsed_s.values())
    return sum(elapsed_s.values()) / longest_s if longest_s > 0.0 else float(len(elapsed_s))


def shares_target(member: PoolMember) -> bool:
    """Whether its drafts take time of the rounds of all, and how much is known."""
    return not member.leads and _is_measured(member)


def _is_measured(member: PoolMember) -> bool:
    return member.costs is not None and bool(member.costs.draft_s)


def _in_rounds(member: PoolMember) -> float:
    """Its longest draft, in rounds of the target alone."""
    return member.cost * member.max_draft_len


def _step_s(members: Sequence[PoolMember]) -> float:
    """Of the target alone, from what the profile says of drafters both in seconds and in steps; 1 where it says neither."""
    for member in members:
        if member.costs and member.costs.draft_s and member.costs.draft_s[0][1] > 0.0 and member.cost > 0.0:
            return member.costs.draft_s[0][1] / _in_rounds(member)
    return 1.0
