"""A cascade: per request and round, of several drafters the one that promises most, the dear ones asked only when it pays.

All that this needs is learned from what was committed. Every draft that was made is scored against it, whether it was handed
out or not (full information): so confidences are calibrated for each member, it is known what it means that members agree,
and what asking a dear member adds.
Drafting nothing is a choice, too: a round without a draft is a plain decode, which keeps large batches from losing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.errors import InvalidField
from cluster.types import SamplingParams
from drafters.consensus import Consensus, Testimony
from drafters.protocol import Demand, Draft, Drafter
from drafters.replay import common_prefix_len
from drafters.worth import Costs, OwnGain, Worth
from profiler.online_calibration import OnlineSurvival

_PACE_MEMORY = 0.01  # weight of the newest round in the tokens per step
_MIN_SURVIVAL = 0.02  # what is less likely to survive is not handed out
_MAX_SPLICES = 3  # of one draft
_WORTH_SPLICING = 0.04  # survival under which nobody is asked what comes next

_Found = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and the survival of each


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter of the cascade. ``cost``: of one draft, in one-row steps of the target (a lookup's is nearly 0), until it
    is known better.

    ``splices``: free enough to be asked again behind what another drafted. One that costs nothing is asked every time.
    """

    name: str
    drafter: Drafter
    cost: float
    splices: bool = False


@dataclass(frozen=True, slots=True)
class _Guess:
    """A member's draft, and what its confidences mean."""

    member: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]  # as the member gave them
    testimony: Testimony  # what they mean beside what the lookups drafted
    num_worth: int  # tokens that survive often enough for their rows
    expected_len: float  # sum of their survival, less what their rows cost

    @property
    def survival(self) -> tuple[float, ...]:
        return self.testimony.survival


@dataclass(frozen=True, slots=True)
class _Asked:
    """A dear member was asked when ``at_hand`` was the best guess."""

    member: int
    at_hand: _Guess


@dataclass(slots=True)
class _Round:
    """The last guesses for a request, until the commit that answers them."""

    row_price: float
    heard: tuple[tuple[int, ...], ...] = ()  # what the free members drafted
    guesses: list[_Guess] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)
    cost: float = 0.0  # of the drafts that all have waited for

    @property
    def best(self) -> _Guess:
        return _best_of(self.guesses)


@dataclass(slots=True)
class _Followed:
    own: dict[int, OwnGain]  # of the dear members
    round: _Round | None = None
    num_drafts: dict[int, int] = field(default_factory=dict)  # by the member that made the best guess


class CascadeDrafter:
    """Members from the cheapest to the dearest; all follow every request.

    A dear member is asked for those requests of a batch for which the tokens that it is known to add, less what their rows
    cost, are together more than all would decode in the time that it takes (the rule that maximises tokens per second in
    the long run). Lookups go on where a draft ends, and take over a model's draft from where they promise more than the
    rest of it.

    Args:
        clock: in seconds, of which only differences count: by it is learned what the members cost. None: as configured.

    Raises:
        InvalidField: no members, or their costs do not ascend.
    """

    def __init__(self, members: Sequence[Member], clock: Callable[[], float] | None = None) -> None:
        if not members:
            raise InvalidField("members", 0, "must hold at least one drafter")
        if members[0].cost < 0.0 or any(a.cost > b.cost for a, b in pairwise(members)):
            raise InvalidField("members", [m.name for m in members], "must stand in the order of their cost, from 0")
        self._members = tuple(members)
        self._survival = [OnlineSurvival() for _ in members]
        self._num_free = sum(member.cost == 0.0 for member in members)
        self._consensus = Consensus(len(members), self._num_free)
        self._worth = {i: Worth() for i, member in enumerate(members) if member.cost > 0.0}
        self._costs = Costs({i: members[i].cost for i in self._worth})
        self._clock = clock
        self._proposed_s: float | None = None  # when the drafts were made that no commit has answered yet
        self._tokens_per_round, self._cost_per_round = 1.5, 1.0
        self._followed: dict[str, _Followed] = {}

    @property
    def drafts_by_member(self) -> dict[str, int]:
        """Drafts of the requests followed now, by the member that made them."""
        return {
            member.name: sum(followed.num_drafts.get(i, 0) for followed in self._followed.values())
            for i, member in enumerate(self._members)
        }

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        for member in self._members:
            member.drafter.open(request_id, token_ids, prompt_len, sampling)
        self._followed[request_id] = _Followed({i: OwnGain() for i in self._worth})

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        followed = self._followed[request_id]
        if self._clock is not None and self._proposed_s is not None and followed.round is not None:
            self._costs.came_true(self._clock() - self._proposed_s)
            self._proposed_s = None  # what the same round committed for others comes with it
        for member in self._members:
            member.drafter.extend(request_id, token_ids)
        if followed.round is not None and token_ids:
            self._learn(followed, followed.round, token_ids)
        followed.round = None

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        rounds = [_Round(demand.row_price) for demand in demands]
        free = [self._drafts(index, demands) for index in range(self._num_free)]
        for i, round_ in enumerate(rounds):
            heard = [drafts[i] for drafts in free]
            round_.heard = tuple(draft.token_ids for draft, _ in heard)
            round_.guesses = [self._guess(index, round_, *found) for index, found in enumerate(heard)]
        for index in range(self._num_free, len(self._members)):
            asked = self._asked(index, demands, rounds)
            if not asked:
                continue
            drafts = self._drafts(index, [demands[i] for i in asked])
            for i, found in zip(asked, drafts, strict=True):
                if rounds[i].guesses:
                    rounds[i].asked.append(_Asked(index, rounds[i].best))
                rounds[i].guesses.append(self._guess(index, rounds[i], *found))
            cost = self._costs.of(index, len(asked), len(demands))
            for round_ in rounds:
                round_.cost += cost
        settled = [self._settle(demand, round_) for demand, round_ in zip(demands, rounds, strict=True)]
        if self._clock is not None and not all(demand.ahead for demand in demands):
            self._proposed_s = self._clock()
        return settled

    def release(self, request_id: str) -> None:
        for member in self._members:
            member.drafter.release(request_id)
        self._followed.pop(request_id, None)

    def check_integrity(self) -> None:
        for member in self._members:
            member.drafter.check_integrity()

    def _drafts(self, index: int, demands: Sequence[Demand]) -> list[tuple[Draft, tuple[float, ...]]]:
        """Of a member, with the survival of their prefixes. What those of a dear one take is learned."""
        drafter = self._members[index].drafter
        if self._clock is None or index not in self._worth:
            drafts = drafter.propose(demands)
        else:
            start_s = self._clock()
            drafts = drafter.propose(demands)
            self._costs.drafted(index, len(demands), self._clock() - start_s)
        return list(zip(drafts, self._survival[index].survival([d.confidences for d in drafts]), strict=True))

    def _guess(self, index: int, round_: _Round, draft: Draft, survival: tuple[float, ...]) -> _Guess:
        testimony = self._consensus.weigh(index, draft.token_ids, survival, round_.heard)
        worth = [probability for probability in testimony.survival if probability > round_.row_price]
        expected_len = sum(worth) - len(worth) * round_.row_price
        return _Guess(index, draft.token_ids, draft.confidences, testimony, len(worth), expected_len)

    def _asked(self, index: int, demands: Sequence[Demand], rounds: Sequence[_Round]) -> Sequence[int]:
        """For which demands a member is asked."""
        if not rounds or not rounds[0].guesses:
            return range(len(demands))
        forgone = len(demands) * self._tokens_per_round / self._cost_per_round  # by the batch, in a round's time
        at_hand = [
            (round_.best.expected_len, self._followed[demand.request_id].own[index])
            for demand, round_ in zip(demands, rounds, strict=True)
        ]
        return self._worth[index].choose(at_hand, lambda num: forgone * self._costs.of(index, num, len(demands)))

    def _learn(self, followed: _Followed, round_: _Round, token_ids: Sequence[int]) -> None:
        """What was committed says of every guess how far it was right, and no more than so far."""
        for guess in round_.guesses:
            num_right = _num_right(guess, token_ids)
            self._survival[guess.member].record(guess.confidences[: len(token_ids)], num_right)
            self._consensus.record(guess.testimony, len(token_ids), num_right)
        for asked in round_.asked:
            until = next(i for i, guess in enumerate(round_.guesses) if guess.member == asked.member)
            chosen = _best_of(round_.guesses[: until + 1])
            gain = _worth(chosen, token_ids, round_.row_price) - _worth(asked.at_hand, token_ids, round_.row_price)
            self._worth[asked.member].learn(gain, asked.at_hand.expected_len, followed.own[asked.member])
        self._tokens_per_round += _PACE_MEMORY * (len(token_ids) - self._tokens_per_round)
        self._cost_per_round += _PACE_MEMORY * (1.0 + round_.cost - self._cost_per_round)

    def _settle(self, demand: Demand, round_: _Round) -> Draft:
        best = round_.best
        if not demand.ahead:
            followed = self._followed[demand.request_id]
            followed.round = round_
            followed.num_drafts[best.member] = followed.num_drafts.get(best.member, 0) + 1
        token_ids, survival = self._spliced(demand, best)
        least = max(_MIN_SURVIVAL, demand.least_survival)
        kept = sum(probability >= least for probability in survival)  # survival never rises
        before = (1.0, *survival)
        confidences = tuple(min(1.0, survival[i] / before[i]) for i in range(kept))
        return Draft(demand.request_id, token_ids[:kept], confidences)

    def _spliced(self, demand: Demand, guess: _Guess) -> _Found:
        """Tokens and their survival: a model's first tokens, then a lookup's from where that promises more; and what lookups
        have to say behind the end."""
        token_ids, survival = guess.token_ids, guess.survival
        place = len(token_ids) if self._members[guess.member].splices else 1
        num_splices = 0
        least = max(_WORTH_SPLICING, demand.row_price)  # what comes behind survives less often
        kept = max(_MIN_SURVIVAL, demand.least_survival)
        while token_ids and place <= len(token_ids) and place < demand.num_tokens and num_splices < _MAX_SPLICES:
            if survival[place - 1] < least:
                break
            rest = self._lookup(demand, token_ids[:place], survival[place - 1])
            if _sum_of(rest[1], kept) > _sum_of(survival[place:], kept):
                token_ids, survival = (*token_ids[:place], *rest[0]), (*survival[:place], *rest[1])
                num_splices += 1
                place = len(token_ids)
            else:
                place += 1
        return token_ids, survival

    def _lookup(self, demand: Demand, drafted: tuple[int, ...], survival: float) -> _Found:
        """What the most promising of the lookups says behind ``drafted``, which survives with probability ``survival``."""
        best: _Found = ((), ())
        ahead, price = (*demand.ahead, *drafted), demand.row_price / survival
        behind = Demand(demand.request_id, demand.num_tokens - len(drafted), ahead, price)
        for index, member in enumerate(self._members):
            if member.splices:
                (draft,) = member.drafter.propose([behind])
                (chances,) = self._survival[index].survival([draft.confidences])
                found = tuple(survival * chance for chance in chances)
                if sum(found) > sum(best[1]):
                    best = (draft.token_ids, found)
        return best


def _sum_of(survival: Sequence[float], least: float) -> float:
    """Of a draft, without what is not handed out."""
    return sum(probability for probability in survival if probability >= least)


def _best_of(guesses: Sequence[_Guess]) -> _Guess:
    """Of equals the first, which is the cheaper."""
    best = guesses[0]
    for guess in guesses:
        if guess.expected_len > best.expected_len:
            best = guess
    return best


def _worth(guess: _Guess, token_ids: Sequence[int], row_price: float) -> float:
    """Right tokens among those worth their rows, less what these cost."""
    return min(_num_right(guess, token_ids), guess.num_worth) - guess.num_worth * row_price


def _num_right(guess: _Guess, token_ids: Sequence[int]) -> int:
    return common_prefix_len(guess.token_ids, token_ids)
