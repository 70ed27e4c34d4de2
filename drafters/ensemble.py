"""The free members of a cascade, queried together: calibration of their drafts by agreement, the best draft, splicing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms
from drafters.consensus import ComparedDraft, Consensus
from drafters.protocol import Demand, Draft, Drafter
from engine.acceptance import common_prefix_len
from router.estimates.survival import OnlineSurvival

MIN_SURVIVAL = 0.02  # a draft ends before a token less likely to survive
MAX_SPLICES = 3  # of one draft
MIN_SPLICE_SURVIVAL = 0.04  # lookups are not queried behind a token less likely to survive

_Continuation = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and the survival of each


@dataclass(frozen=True, slots=True)
class MemberDraft:
    """A member's draft and its calibrated survival."""

    member: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]  # as the member gave them
    compared: ComparedDraft  # with the drafts of the free members
    num_paying: int  # tokens that survive more often than their rows cost
    expected_len: float  # sum of their survival, less what their rows cost

    @property
    def survival(self) -> tuple[float, ...]:
        return self.compared.survival

    @classmethod
    def of(
        cls,
        member: int,
        draft: Draft,
        survival: OnlineSurvival,
        consensus: Consensus,
        references: Sequence[tuple[int, ...]],
        row_price: float,
    ) -> Self:
        """``references``: drafts of the free members."""
        (alone,) = survival.survival([draft.confidences])
        compared = consensus.compare(member, draft.token_ids, alone, references)
        paying = [probability for probability in compared.survival if probability > row_price]
        expected_len = sum(paying) - len(paying) * row_price
        return cls(member, draft.token_ids, draft.confidences, compared, len(paying), expected_len)

    def record(self, token_ids: Sequence[int], survival: OnlineSurvival, consensus: Consensus) -> None:
        """Records how far the draft was right, as far as tokens were committed."""
        num_right = common_prefix_len(self.token_ids, token_ids)
        survival.record(self.confidences[: len(token_ids)], num_right)
        consensus.record(self.compared, len(token_ids), num_right)

    def net_gain(self, token_ids: Sequence[int], row_price: float) -> float:
        """Right tokens among the paying ones, less the cost of their rows."""
        return min(common_prefix_len(self.token_ids, token_ids), self.num_paying) - self.num_paying * row_price


def best_of(drafts: Sequence[MemberDraft]) -> MemberDraft:
    """The first of equals, which is the cheaper."""
    return max(drafts, key=lambda draft: draft.expected_len)


@dataclass(slots=True)
class _LookupDrafts:
    demand: Demand
    token_ids: tuple[tuple[int, ...], ...] = ()
    drafts: list[MemberDraft] = field(default_factory=list)


class PlainEnsemble:
    """The free members, in Python. ``place`` is the index of a demand in the last query.

    Args:
        free: the members of cost 0, which are the first of all.
        splicers: members that can continue another's draft, by their index among all.
        survival: calibration of all members.
    """

    def __init__(
        self, free: Sequence[Drafter], splicers: dict[int, Drafter], survival: Sequence[OnlineSurvival], consensus: Consensus
    ) -> None:
        self._free = free
        self._splicers = splicers
        self._survival = survival
        self._consensus = consensus
        self._queries: list[_LookupDrafts] = []
        self._pending: dict[str, _LookupDrafts] = {}  # until the commit that verifies them

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._pending.pop(request_id, None)
        for drafter in self._free:
            drafter.open(request_id, token_ids, prompt_len, sampling, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        for drafter in self._free:
            drafter.extend(request_id, token_ids)
        pending = self._pending.pop(request_id, None)
        if pending is not None and token_ids:
            for draft in pending.drafts:
                draft.record(token_ids, self._survival[draft.member], self._consensus)
            self._consensus.learn_due()

    def release(self, request_id: str) -> None:
        for drafter in self._free:
            drafter.release(request_id)
        self._pending.pop(request_id, None)

    def check_integrity(self) -> None:
        for drafter in self._free:
            drafter.check_integrity()

    def query(self, demands: Sequence[Demand]) -> list[float]:
        """Queries the free members. Returns the expected tokens of the best draft for each demand; empty without members."""
        self._queries = [_LookupDrafts(demand) for demand in demands]
        drafts = [drafter.propose(demands) for drafter in self._free]
        for place, query in enumerate(self._queries):
            own = [drafts_of[place] for drafts_of in drafts]
            query.token_ids = tuple(draft.token_ids for draft in own)
            query.drafts = [self.calibrate(place, member, draft) for member, draft in enumerate(own)]
            if not query.demand.ahead:
                self._pending[query.demand.request_id] = query
        return [best_of(query.drafts).expected_len for query in self._queries] if self._free else []

    def best(self, place: int) -> MemberDraft:
        return best_of(self._queries[place].drafts)

    def calibrate(self, place: int, member: int, draft: Draft) -> MemberDraft:
        query = self._queries[place]
        own = self._survival[member]
        return MemberDraft.of(member, draft, own, self._consensus, query.token_ids, query.demand.terms.row_price)

    def best_drafts(self, places: Sequence[int]) -> list[tuple[int, Draft]]:
        """For each place: the free member with the best draft, and that draft with its splices."""
        return [(draft.member, self.spliced(place, draft)) for place in places for draft in (self.best(place),)]

    def spliced(self, place: int, draft: MemberDraft) -> Draft:
        """A draft that lookups extend at its end; they replace the rest of a model's draft where they promise more."""
        demand = self._queries[place].demand
        token_ids, survival = self._with_splices(demand, draft)
        least = max(MIN_SURVIVAL, demand.terms.least_survival)
        kept = sum(probability >= least for probability in survival)  # survival never rises
        before = (1.0, *survival)
        confidences = tuple(min(1.0, survival[i] / before[i]) for i in range(kept))
        return Draft(demand.request_id, token_ids[:kept], confidences)

    def learn(self, draft: MemberDraft, token_ids: Sequence[int]) -> None:
        draft.record(token_ids, self._survival[draft.member], self._consensus)
        self._consensus.learn_due()

    def _with_splices(self, demand: Demand, draft: MemberDraft) -> _Continuation:
        """A model's first tokens, then a lookup's where that promises more, and lookups again at the end."""
        token_ids, survival = draft.token_ids, draft.survival
        place = len(token_ids) if draft.member in self._splicers else 1
        num_splices = 0
        least = max(MIN_SPLICE_SURVIVAL, demand.terms.row_price)  # later tokens survive less often
        kept = max(MIN_SURVIVAL, demand.terms.least_survival)
        while token_ids and place <= len(token_ids) and place < demand.num_tokens and num_splices < MAX_SPLICES:
            if survival[place - 1] < least:
                break
            rest = self._continuation(demand, token_ids[:place], survival[place - 1])
            if _sum_of(rest[1], kept) > _sum_of(survival[place:], kept):
                token_ids, survival = (*token_ids[:place], *rest[0]), (*survival[:place], *rest[1])
                num_splices += 1
                place = len(token_ids)
            else:
                place += 1
        return token_ids, survival

    def _continuation(self, demand: Demand, drafted: tuple[int, ...], survival: float) -> _Continuation:
        """The most promising lookup's tokens behind ``drafted``, which survives with probability ``survival``."""
        best: _Continuation = ((), ())
        ahead, price = (*demand.ahead, *drafted), demand.terms.row_price / survival
        behind = Demand(demand.request_id, demand.num_tokens - len(drafted), ahead, DraftTerms(row_price=price))
        for member, drafter in self._splicers.items():
            (draft,) = drafter.propose([behind])
            (chances,) = self._survival[member].survival([draft.confidences])
            found = tuple(survival * chance for chance in chances)
            if sum(found) > sum(best[1]):
                best = (draft.token_ids, found)
        return best


def _sum_of(survival: Sequence[float], least: float) -> float:
    """Sum of the survival of the returned part of a draft."""
    return sum(probability for probability in survival if probability >= least)
