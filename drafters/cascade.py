"""A cascade: per request and round, the cheapest drafter whose draft promises enough, else the next; and drafts spliced.

What "enough" means is learned: a draft is taken when its expected accepted length is at least what the members after it
have lately brought, less what they cost. Asking nobody on a hopeless request is a choice, too: a round without a draft is
a plain decode, which is what keeps large batches from losing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.errors import InvalidField
from cluster.types import SamplingParams
from drafters.protocol import Demand, Draft, Drafter

_SMOOTHING = 0.1  # weight of the newest round in what a member brings
_PRIOR_LEN = 0.5  # accepted tokens expected of a member that was never asked
_RECOVERY = 0.002  # by which a member that is not asked drifts back to that, or its luck could never turn


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter of the cascade. ``cost``: of one draft, in one-row steps of the target (a look-up's is nearly 0).

    ``splices``: free enough to be asked again after each token of a later member's draft.
    """

    name: str
    drafter: Drafter
    cost: float
    splices: bool = False


@dataclass(slots=True)
class _Record:
    """What a member has brought: accepted tokens per draft, and how far its confidences may be believed."""

    accepted_len: float = _PRIOR_LEN
    trust: float = 1.0  # accepted over expected

    def learn(self, expected_len: float, num_accepted: int) -> None:
        self.accepted_len += _SMOOTHING * (num_accepted - self.accepted_len)
        if expected_len > 0.0:
            ratio = min(num_accepted / expected_len, 4.0)
            self.trust += _SMOOTHING * (ratio - self.trust)

    def rest(self) -> None:
        """A batch went by in which the member was not asked."""
        self.accepted_len += _RECOVERY * (_PRIOR_LEN - self.accepted_len)


@dataclass(slots=True)
class _Guess:
    """The last draft of a request, until the commit that answers it."""

    token_ids: tuple[int, ...]
    member: int
    expected_len: float


@dataclass(slots=True)
class _Followed:
    guess: _Guess | None = None
    turns: dict[int, int] = field(default_factory=dict)  # member -> drafts of this request


class CascadeDrafter:
    """Members from the cheapest to the dearest; all follow every request.

    Raises:
        InvalidField: no members, or their costs do not ascend.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        if not members:
            raise InvalidField("members", 0, "must hold at least one drafter")
        if any(a.cost > b.cost for a, b in pairwise(members)):
            raise InvalidField("members", [m.name for m in members], "must stand in the order of their cost")
        self._members = tuple(members)
        self._records = [_Record() for _ in members]
        self._followed: dict[str, _Followed] = {}

    @property
    def drafts_by_member(self) -> dict[str, int]:
        """Drafts of the requests followed now, by the member that made them."""
        return {
            member.name: sum(followed.turns.get(i, 0) for followed in self._followed.values())
            for i, member in enumerate(self._members)
        }

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        for member in self._members:
            member.drafter.open(request_id, token_ids, prompt_len, sampling)
        self._followed[request_id] = _Followed()

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        for member in self._members:
            member.drafter.extend(request_id, token_ids)
        followed = self._followed[request_id]
        guess, followed.guess = followed.guess, None
        if guess is not None:
            num_accepted = _num_equal(guess.token_ids, token_ids)
            if num_accepted < len(guess.token_ids) and num_accepted == len(token_ids):
                return  # the commit ended before the guess did: nothing was refuted
            self._records[guess.member].learn(guess.expected_len, num_accepted)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts: dict[str, tuple[int, Draft]] = {}
        open_demands = list(demands)
        for i, member in enumerate(self._members):
            if not open_demands:
                self._records[i].rest()
                continue
            bar = self._bar(i)
            still_open = []
            for demand, draft in zip(open_demands, member.drafter.propose(open_demands), strict=True):
                best = drafts.get(demand.request_id)
                if best is None or self._expected_len(i, draft) > self._expected_len(*best):
                    drafts[demand.request_id] = best = (i, draft)
                if self._expected_len(*best) < bar:
                    still_open.append(demand)
            open_demands = still_open
        return [self._settle(demand, *drafts[demand.request_id]) for demand in demands]

    def release(self, request_id: str) -> None:
        for member in self._members:
            member.drafter.release(request_id)
        self._followed.pop(request_id, None)

    def check_integrity(self) -> None:
        for member in self._members:
            member.drafter.check_integrity()

    def _bar(self, index: int) -> float:
        """What the best of the members after ``index`` may be expected to bring, less what it costs more."""
        own = self._members[index].cost
        later = zip(self._members[index + 1 :], self._records[index + 1 :], strict=True)
        return max((record.accepted_len - (member.cost - own) for member, record in later), default=0.0)

    def _expected_len(self, index: int, draft: Draft) -> float:
        """Expected accepted tokens: sum over the tokens of the probability that all up to it are right."""
        return self._records[index].trust * _survival_sum(draft.confidences)

    def _settle(self, demand: Demand, index: int, draft: Draft) -> Draft:
        """Splices, and notes what was guessed."""
        spliced = self._splice(demand, index, draft)
        followed = self._followed[demand.request_id]
        if not demand.ahead:
            followed.guess = _Guess(spliced.token_ids, index, self._expected_len(index, draft))
            followed.turns[index] = followed.turns.get(index, 0) + 1
        return spliced

    def _splice(self, demand: Demand, index: int, draft: Draft) -> Draft:
        """A model's first tokens, then a look-up's, from the first place where that promises more than the model's rest."""
        for i, member in enumerate(self._members[:index]):
            if not member.splices:
                continue
            for place in range(1, len(draft.token_ids) + 1):
                num_rest = demand.num_tokens - place
                if num_rest <= 0:
                    break
                ahead = (*demand.ahead, *draft.token_ids[:place])
                (rest,) = member.drafter.propose([Demand(demand.request_id, num_rest, ahead)])
                promised = self._records[index].trust * _survival_sum(draft.confidences[place:])
                if self._expected_len(i, rest) > promised:
                    return Draft(
                        demand.request_id,
                        (*draft.token_ids[:place], *rest.token_ids),
                        (*draft.confidences[:place], *rest.confidences),
                    )
        return draft


def _survival_sum(confidences: Sequence[float]) -> float:
    total, survival = 0.0, 1.0
    for confidence in confidences:
        survival *= confidence
        total += survival
    return total


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
