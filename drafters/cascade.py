"""A cascade: per request and round, the most promising draft of several drafters. Expensive members are queried only when
that pays.

Every draft is scored against the committed tokens, whether used or not: this calibrates each member's confidences, the
corrections by agreement, and the marginal gain of an expensive member.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from drafters.consensus import Consensus
from drafters.ensemble import MemberDraft, PlainEnsemble, best_of
from drafters.native.ensemble import MOST_MEMBERS, NativeEnsemble
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from router.estimates.draft_times import DraftTimes
from router.estimates.marginal_gain import MarginalGain
from router.estimates.survival import OnlineSurvival

_FEW_TIMES = 3  # batches of drafts, after which their measured time counts


@dataclass(frozen=True, slots=True)
class CascadeMember:
    name: str
    drafter: Drafter
    cost: float  # prior cost of one draft, in one-row steps of the target; 0: queried every time
    splices: bool = False  # queried again behind another member's draft


@dataclass(frozen=True, slots=True)
class _ModelQuery:
    draft: MemberDraft
    before: MemberDraft | None  # the best draft without it, if there is one
    best: MemberDraft


@dataclass(slots=True)
class _CascadeRound:
    """The last drafts for a request, until the commit that verifies them."""

    row_price: float
    queries: list[_ModelQuery] = field(default_factory=list)

    @property
    def best(self) -> MemberDraft | None:
        return self.queries[-1].best if self.queries else None


class CascadeDrafter:
    """Members from cheapest to most expensive; all follow every request.

    An expensive member is queried for the requests of a batch for which the expected added tokens, less the cost of their
    rows, together exceed what the whole batch would decode in that time, at the price of a second that the target sends. By
    the members' costs where it sends none.

    Args:
        clock: measures how long members draft, in seconds; None: by their costs.
        few_trials: an expensive member of which little is known is queried for few requests (`MarginalGain.choose`). For a
            cascade whose queries are decided by what all members cost together. It needs ``clock``.

    Raises:
        InvalidField: the costs of the members do not ascend.
    """

    capabilities = Capabilities()

    def __init__(
        self, members: Sequence[CascadeMember], clock: Callable[[], float] | None = None, *, few_trials: bool = False
    ) -> None:
        if not members or members[0].cost < 0.0 or any(a.cost > b.cost for a, b in pairwise(members)):
            raise InvalidField("members", [m.name for m in members], "must be one or more, in order of cost, from 0")
        self._members = tuple(members)
        self._num_free = sum(member.cost == 0.0 for member in members)
        self._ensemble = _ensemble(members, self._num_free)
        self._followers: list[PlainEnsemble | NativeEnsemble | Drafter] = [
            self._ensemble,
            *(member.drafter for member in members[self._num_free :]),
        ]
        self._gains = {i: MarginalGain() for i, member in enumerate(members) if member.cost > 0.0}
        # Until batches differ, larger ones are thought to take as long as those that were timed: a member on trial, which
        # drafts for few requests, might else never draft for all. Timing larger ones corrects it.
        self._times = {i: DraftTimes(0.0) for i in self._gains}
        self._largest = dict.fromkeys(self._gains, 0)  # batch that was timed
        self._clock = clock
        self._few_trials = few_trials and clock is not None
        self._rounds: dict[str, _CascadeRound] = {}  # by request

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        for drafter in self._followers:
            drafter.open(request_id, token_ids, prompt_len, sampling, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        round_ = self._rounds.pop(request_id, None)
        for drafter in self._followers:
            drafter.extend(request_id, token_ids)
        if round_ is not None and token_ids:
            self._learn(round_, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        rounds = [_CascadeRound(demand.terms.row_price) for demand in demands]
        expected_lens = self._ensemble.query(demands)
        for member in range(self._num_free, len(self._members)):
            chosen = self._choose(member, demands, expected_lens)
            if not chosen:
                continue
            start_s = self._clock() if self._clock is not None else 0.0
            drafts = self._members[member].drafter.propose([demands[i] for i in chosen])
            if self._clock is not None:
                self._times[member].add(len(chosen), self._clock() - start_s)
                self._largest[member] = max(self._largest[member], len(chosen))
            expected_lens = expected_lens or [0.0] * len(demands)
            for i, draft in zip(chosen, drafts, strict=True):
                own, before = self._ensemble.calibrate(i, member, draft), rounds[i].best
                if before is None and self._num_free:
                    before = self._ensemble.best(i)
                best = own if before is None else best_of((before, own))
                rounds[i].queries.append(_ModelQuery(own, before, best))
                expected_lens[i] = best.expected_len
        return self._best_drafts(demands, rounds)

    def release(self, request_id: str) -> None:
        for drafter in self._followers:
            drafter.release(request_id)
        self._rounds.pop(request_id, None)

    def check_integrity(self) -> None:
        for drafter in self._followers:
            drafter.check_integrity()

    def _choose(self, member: int, demands: Sequence[Demand], expected_lens: Sequence[float]) -> Sequence[int]:
        """Demands that a member is queried for. ``expected_lens``: of the best draft so far."""
        if not expected_lens:
            return range(len(demands))
        second_price = sum([demand.terms.second_price for demand in demands])
        return self._gains[member].choose(
            expected_lens,
            partial(self._price, member, second_price, 1.0 + sum(expected_lens) / len(demands)),
            self._largest[member] if self._few_trials else None,
            [not demand.ahead for demand in demands],
        )

    def _price(self, member: int, second_price: float, num_each: float, num: int) -> float:
        """Tokens that the batch would decode while a member drafts for ``num`` of it. ``num_each``: of a request in a round,
        as expected without the member."""
        times = self._times[member]
        if second_price and times.num >= _FEW_TIMES:
            return second_price * times.at(num)
        return self._members[member].cost * num_each * num

    def _best_drafts(self, demands: Sequence[Demand], rounds: Sequence[_CascadeRound]) -> list[Draft]:
        expensive = [best if (best := round_.best) and best.member >= self._num_free else None for round_ in rounds]
        free = iter(self._ensemble.best_drafts([place for place, best in enumerate(expensive) if best is None]))
        for demand, round_ in zip(demands, rounds, strict=True):
            if not demand.ahead:
                self._rounds[demand.request_id] = round_
        return [
            next(free)[1] if best is None else self._ensemble.spliced(place, best) for place, best in enumerate(expensive)
        ]

    def _learn(self, round_: _CascadeRound, token_ids: Sequence[int]) -> None:
        for query in round_.queries:
            self._ensemble.learn(query.draft, token_ids)
            if query.before is not None:
                price, member = round_.row_price, query.draft.member
                gain = query.best.net_gain(token_ids, price) - query.before.net_gain(token_ids, price)
                self._gains[member].learn(gain, query.before.expected_len)


def _ensemble(members: Sequence[CascadeMember], num_free: int) -> PlainEnsemble | NativeEnsemble:
    survival, consensus = [OnlineSurvival() for _ in members], Consensus(len(members), num_free)
    free = [member.drafter for member in members[:num_free]]
    lookups = [lookup for drafter in free if (lookup := drafter.capabilities.lookup) is not None]
    all_splice = [member.splices for member in members] == [i < num_free for i in range(len(members))]
    if 0 < len(lookups) == num_free <= MOST_MEMBERS and all_splice:
        return NativeEnsemble(lookups[0].library, lookups, survival, consensus)
    splicers = {i: member.drafter for i, member in enumerate(members) if member.splices}
    return PlainEnsemble(free, splicers, survival, consensus)
