"""A cascade: per request and round, the most promising draft of several drafters. Expensive members are queried only when
that pays.

Everything is learned from committed tokens. Every draft is scored against them, whether used or not (full information): this
calibrates each member's confidences, the meaning of agreement between members, and the marginal gain of an expensive member.
Drafting nothing is a choice, too: a round without a draft is a plain decode, so large batches do not lose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.errors import InvalidField
from cluster.types import SamplingParams
from drafters.consensus import Consensus
from drafters.ensemble import LookupEnsemble, MemberDraft, PlainEnsemble, best_of
from drafters.native.ensemble import MOST_MEMBERS, NativeEnsemble
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from router.estimates.decayed import ema
from router.estimates.draft_times import DraftCosts
from router.estimates.marginal_gain import MarginalGain, RequestGain
from router.estimates.survival import OnlineSurvival

_RATE_WEIGHT = 0.01  # weight of the newest round in the tokens per step


@dataclass(frozen=True, slots=True)
class CascadeMember:
    """A drafter of the cascade. ``cost``: prior cost of one draft, in one-row steps of the target (nearly 0 for a
    lookup), until measured.

    ``splices``: cheap enough to be queried again behind another member's draft. A member of cost 0 is queried every time.
    """

    name: str
    drafter: Drafter
    cost: float
    splices: bool = False


@dataclass(frozen=True, slots=True)
class _ModelQuery:
    """A query of an expensive member. ``at_hand``, ``best``: the best draft before it, and with it; None without any
    other draft.
    """

    guess: MemberDraft
    at_hand: MemberDraft | None
    best: MemberDraft


@dataclass(slots=True)
class _Round:
    """The last drafts for a request, until the commit that answers them."""

    row_price: float
    cost: float = 0.0  # of the drafts that all have waited for
    asked: list[_ModelQuery] = field(default_factory=list)

    @property
    def best(self) -> MemberDraft | None:
        return self.asked[-1].best if self.asked else None


@dataclass(slots=True)
class _CascadeSession:
    own: dict[int, RequestGain]  # of the dear members
    round: _Round | None = None
    num_drafts: dict[int, int] = field(default_factory=dict)  # by the member that made the best guess


class CascadeDrafter:
    """Members from cheapest to most expensive; all follow every request.

    An expensive member is queried for the requests of a batch for which the expected added tokens, less the cost of their
    rows, together exceed what the whole batch would decode in that time (the rule that maximises long-run tokens per
    second). Lookups extend a draft at its end, and replace the rest of a model's draft where they promise more.

    Args:
        clock: in seconds, only differences count; measures the members' costs. None: costs as configured.

    Raises:
        InvalidField: no members, or their costs do not ascend.
    """

    capabilities = Capabilities()

    def __init__(self, members: Sequence[CascadeMember], clock: Callable[[], float] | None = None) -> None:
        if not members:
            raise InvalidField("members", 0, "must hold at least one drafter")
        if members[0].cost < 0.0 or any(a.cost > b.cost for a, b in pairwise(members)):
            raise InvalidField("members", [m.name for m in members], "must stand in the order of their cost, from 0")
        self._members = tuple(members)
        self._num_free = sum(member.cost == 0.0 for member in members)
        self._hearing = _hearing(members, self._num_free)
        self._told: list[LookupEnsemble | Drafter] = [
            self._hearing,
            *(member.drafter for member in members[self._num_free :]),
        ]
        self._worth = {i: MarginalGain() for i, member in enumerate(members) if member.cost > 0.0}
        self._costs = DraftCosts({i: members[i].cost for i in self._worth})
        self._clock = clock
        self._proposed_s: float | None = None  # when the drafts were made that no commit has answered yet
        self._tokens_per_round, self._cost_per_round = 1.5, 1.0
        self._followed: dict[str, _CascadeSession] = {}

    @property
    def drafts_by_member(self) -> dict[str, int]:
        """Drafts of the requests followed now, by the member that made them."""
        return {
            member.name: sum(followed.num_drafts.get(i, 0) for followed in self._followed.values())
            for i, member in enumerate(self._members)
        }

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        for drafter in self._told:
            drafter.open(request_id, token_ids, prompt_len, sampling)
        self._followed[request_id] = _CascadeSession({i: RequestGain() for i in self._worth})

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        followed = self._followed[request_id]
        if self._clock is not None and self._proposed_s is not None and followed.round is not None:
            self._costs.note_round(self._clock() - self._proposed_s)
            self._proposed_s = None  # what the same round committed for others comes with it
        for drafter in self._told:
            drafter.extend(request_id, token_ids)
        if followed.round is not None and token_ids:
            self._learn(followed, followed.round, token_ids)
        followed.round = None

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        rounds = [_Round(demand.row_price) for demand in demands]
        at_hand = self._hearing.hear(demands)
        for member in range(self._num_free, len(self._members)):
            asked = self._asked(member, demands, at_hand)
            if not asked:
                continue
            drafts = self._drafts(member, [demands[i] for i in asked])
            at_hand = at_hand or [0.0] * len(demands)
            for i, draft in zip(asked, drafts, strict=True):
                guess, best = self._hearing.weigh(i, member, draft), rounds[i].best
                if best is None and self._num_free:
                    best = self._hearing.best(i)
                rounds[i].asked.append(_ModelQuery(guess, best, guess if best is None else best_of((best, guess))))
                at_hand[i] = rounds[i].asked[-1].best.expected_len
            cost = self._costs.of(member, len(asked), len(demands))
            for round_ in rounds:
                round_.cost += cost
        settled = self._settled(demands, rounds)
        if self._clock is not None and not all(demand.ahead for demand in demands):
            self._proposed_s = self._clock()
        return settled

    def release(self, request_id: str) -> None:
        for drafter in self._told:
            drafter.release(request_id)
        self._followed.pop(request_id, None)

    def check_integrity(self) -> None:
        for drafter in self._told:
            drafter.check_integrity()

    def _drafts(self, index: int, demands: Sequence[Demand]) -> list[Draft]:
        """Drafts of an expensive member; learns their time."""
        drafter = self._members[index].drafter
        if self._clock is None:
            return drafter.propose(demands)
        start_s = self._clock()
        drafts = drafter.propose(demands)
        self._costs.note_drafts(index, len(demands), self._clock() - start_s)
        return drafts

    def _asked(self, index: int, demands: Sequence[Demand], at_hand: Sequence[float]) -> Sequence[int]:
        """Demands that a member is queried for. ``at_hand``: expected tokens of the best draft so far, for each."""
        if not at_hand:
            return range(len(demands))
        forgone = len(demands) * self._tokens_per_round / self._cost_per_round  # by the batch, in a round's time
        own = [self._followed[demand.request_id].own[index] for demand in demands]
        expected = list(zip(at_hand, own, strict=True))
        return self._worth[index].choose(expected, lambda num: forgone * self._costs.of(index, num, len(demands)))

    def _settled(self, demands: Sequence[Demand], rounds: Sequence[_Round]) -> list[Draft]:
        """The best draft for each demand, as returned."""
        best = [round_.best for round_ in rounds]
        dear = [None if guess is None or guess.member < self._num_free else guess for guess in best]
        free = iter(self._hearing.settle([place for place, guess in enumerate(dear) if guess is None]))
        settled = []
        for place, (demand, round_, guess) in enumerate(zip(demands, rounds, dear, strict=True)):
            if guess is None:
                member, draft = next(free)
            else:
                member, draft = guess.member, self._hearing.spliced(place, guess)
            settled.append(draft)
            if not demand.ahead:
                followed = self._followed[demand.request_id]
                followed.round = round_
                followed.num_drafts[member] = followed.num_drafts.get(member, 0) + 1
        return settled

    def _learn(self, followed: _CascadeSession, round_: _Round, token_ids: Sequence[int]) -> None:
        """Learns the tokens that expensive members added."""
        for asked in round_.asked:
            self._hearing.judge(asked.guess, token_ids)
            if asked.at_hand is not None:
                gain = asked.best.worth(token_ids, round_.row_price) - asked.at_hand.worth(token_ids, round_.row_price)
                member = asked.guess.member
                self._worth[member].learn(gain, asked.at_hand.expected_len, followed.own[member])
        self._tokens_per_round = ema(self._tokens_per_round, len(token_ids), _RATE_WEIGHT)
        self._cost_per_round = ema(self._cost_per_round, 1.0 + round_.cost, _RATE_WEIGHT)


def _hearing(members: Sequence[CascadeMember], num_free: int) -> LookupEnsemble:
    """In C if all free members are in C."""
    survival, consensus = [OnlineSurvival() for _ in members], Consensus(len(members), num_free)
    free = [member.drafter for member in members[:num_free]]
    lookups = [lookup for drafter in free if (lookup := drafter.capabilities.lookup) is not None]
    all_splice = [member.splices for member in members] == [i < num_free for i in range(len(members))]
    if 0 < len(lookups) == num_free <= MOST_MEMBERS and all_splice:
        return NativeEnsemble(lookups[0].library, lookups, survival, consensus)
    splicers = {i: member.drafter for i, member in enumerate(members) if member.splices}
    return PlainEnsemble(free, splicers, survival, consensus)
