"""The free members of a cascade, queried together: calibration of their drafts by agreement, the best draft, and
splicing. Everything is learned from committed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from cluster.types import SamplingParams
from drafters.consensus import ComparedDraft, Consensus
from drafters.protocol import Demand, Draft, Drafter
from drafters.replay import common_prefix_len
from router.estimates.survival import OnlineSurvival

MIN_SURVIVAL = 0.02  # what is less likely to survive is not handed out
MAX_SPLICES = 3  # of one draft
WORTH_SPLICING = 0.04  # survival under which nobody is asked what comes next

_Found = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and the survival of each


@dataclass(frozen=True, slots=True)
class MemberDraft:
    """A member's draft and its calibrated survival."""

    member: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]  # as the member gave them
    testimony: ComparedDraft  # what they mean beside what the free members drafted
    num_worth: int  # tokens that survive often enough for their rows
    expected_len: float  # sum of their survival, less what their rows cost

    @property
    def survival(self) -> tuple[float, ...]:
        return self.testimony.survival

    @classmethod
    def of(
        cls,
        member: int,
        draft: Draft,
        survival: OnlineSurvival,
        consensus: Consensus,
        heard: Sequence[tuple[int, ...]],
        row_price: float,
    ) -> Self:
        """``heard``: drafts of the free members."""
        (alone,) = survival.survival([draft.confidences])
        testimony = consensus.weigh(member, draft.token_ids, alone, heard)
        worth = [probability for probability in testimony.survival if probability > row_price]
        expected_len = sum(worth) - len(worth) * row_price
        return cls(member, draft.token_ids, draft.confidences, testimony, len(worth), expected_len)

    def teach(self, token_ids: Sequence[int], survival: OnlineSurvival, consensus: Consensus) -> None:
        """Learns how far the draft was right, as far as tokens were committed."""
        num_right = self.num_right(token_ids)
        survival.record(self.confidences[: len(token_ids)], num_right)
        consensus.record(self.testimony, len(token_ids), num_right)

    def num_right(self, token_ids: Sequence[int]) -> int:
        return common_prefix_len(self.token_ids, token_ids)

    def worth(self, token_ids: Sequence[int], row_price: float) -> float:
        """Expected right tokens among those worth their rows, less the cost of these rows."""
        return min(self.num_right(token_ids), self.num_worth) - self.num_worth * row_price


def best_of(guesses: Sequence[MemberDraft]) -> MemberDraft:
    """The first of equals, which is the cheaper."""
    best = guesses[0]
    for guess in guesses:
        if guess.expected_len > best.expected_len:
            best = guess
    return best


class LookupEnsemble(Protocol):
    """The free members. They follow every request and learn from what is committed. Demands are named by their index in
    the last query.
    """

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None: ...

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None: ...

    def release(self, request_id: str) -> None: ...

    def check_integrity(self) -> None: ...

    def hear(self, demands: Sequence[Demand]) -> list[float]:
        """Queries the free members. Returns the expected tokens of the best draft for each demand; empty without such
        members. Drafts for demands without ``ahead`` are learned from when their tokens come.
        """

    def best(self, place: int) -> MemberDraft:
        """The most promising of the free members' drafts."""

    def weigh(self, place: int, member: int, draft: Draft) -> MemberDraft:
        """Calibrates an expensive member's draft by its agreement with the free ones."""

    def settle(self, places: Sequence[int]) -> list[tuple[int, Draft]]:
        """For each demand: the member with the best draft, and that draft with its splices."""

    def spliced(self, place: int, guess: MemberDraft) -> Draft:
        """As ``settle``, for an expensive member's draft: lookups replace its rest where they promise more."""

    def judge(self, guess: MemberDraft, token_ids: Sequence[int]) -> None:
        """Learns how far an expensive member's draft was right."""


@dataclass(slots=True)
class _LookupDrafts:
    """Drafts for one demand."""

    demand: Demand
    drafted: tuple[tuple[int, ...], ...] = ()  # by the free members
    guesses: list[MemberDraft] = field(default_factory=list)


class PlainEnsemble:
    """``LookupEnsemble`` in Python, of any drafters.

    Args:
        free: the members of cost 0, which are the first of all.
        splicers: members that can continue another's draft, by their index among all.
        survival: calibration of all members.
    """

    def __init__(
        self,
        free: Sequence[Drafter],
        splicers: dict[int, Drafter],
        survival: Sequence[OnlineSurvival],
        consensus: Consensus,
    ) -> None:
        self._free = free
        self._splicers = splicers
        self._survival = survival
        self._consensus = consensus
        self._heard: list[_LookupDrafts] = []
        self._unanswered: dict[str, _LookupDrafts] = {}

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._unanswered.pop(request_id, None)
        for drafter in self._free:
            drafter.open(request_id, token_ids, prompt_len, sampling)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        for drafter in self._free:
            drafter.extend(request_id, token_ids)
        heard = self._unanswered.pop(request_id, None)
        if heard is not None and token_ids:
            for guess in heard.guesses:
                guess.teach(token_ids, self._survival[guess.member], self._consensus)
            self._consensus.take_up()

    def release(self, request_id: str) -> None:
        for drafter in self._free:
            drafter.release(request_id)
        self._unanswered.pop(request_id, None)

    def check_integrity(self) -> None:
        for drafter in self._free:
            drafter.check_integrity()

    def hear(self, demands: Sequence[Demand]) -> list[float]:
        self._heard = [_LookupDrafts(demand) for demand in demands]
        drafts = [drafter.propose(demands) for drafter in self._free]
        for place, heard in enumerate(self._heard):
            own = [drafts_of[place] for drafts_of in drafts]
            heard.drafted = tuple(draft.token_ids for draft in own)
            heard.guesses = [self._guess(heard, member, draft) for member, draft in enumerate(own)]
            if not heard.demand.ahead:
                self._unanswered[heard.demand.request_id] = heard
        return [best_of(heard.guesses).expected_len for heard in self._heard] if self._free else []

    def best(self, place: int) -> MemberDraft:
        return best_of(self._heard[place].guesses)

    def weigh(self, place: int, member: int, draft: Draft) -> MemberDraft:
        return self._guess(self._heard[place], member, draft)

    def settle(self, places: Sequence[int]) -> list[tuple[int, Draft]]:
        best = [self.best(place) for place in places]
        return [(guess.member, self.spliced(place, guess)) for place, guess in zip(places, best, strict=True)]

    def spliced(self, place: int, guess: MemberDraft) -> Draft:
        demand = self._heard[place].demand
        token_ids, survival = self._with_splices(demand, guess)
        least = max(MIN_SURVIVAL, demand.least_survival)
        kept = sum(probability >= least for probability in survival)  # survival never rises
        before = (1.0, *survival)
        confidences = tuple(min(1.0, survival[i] / before[i]) for i in range(kept))
        return Draft(demand.request_id, token_ids[:kept], confidences)

    def judge(self, guess: MemberDraft, token_ids: Sequence[int]) -> None:
        guess.teach(token_ids, self._survival[guess.member], self._consensus)
        self._consensus.take_up()

    def _guess(self, heard: _LookupDrafts, member: int, draft: Draft) -> MemberDraft:
        survival, price = self._survival[member], heard.demand.row_price
        return MemberDraft.of(member, draft, survival, self._consensus, heard.drafted, price)

    def _with_splices(self, demand: Demand, guess: MemberDraft) -> _Found:
        """A model's first tokens, then a lookup's where that promises more, and lookups again at the end."""
        token_ids, survival = guess.token_ids, guess.survival
        place = len(token_ids) if guess.member in self._splicers else 1
        num_splices = 0
        least = max(WORTH_SPLICING, demand.row_price)  # what comes behind survives less often
        kept = max(MIN_SURVIVAL, demand.least_survival)
        while token_ids and place <= len(token_ids) and place < demand.num_tokens and num_splices < MAX_SPLICES:
            if survival[place - 1] < least:
                break
            rest = self._behind(demand, token_ids[:place], survival[place - 1])
            if _sum_of(rest[1], kept) > _sum_of(survival[place:], kept):
                token_ids, survival = (*token_ids[:place], *rest[0]), (*survival[:place], *rest[1])
                num_splices += 1
                place = len(token_ids)
            else:
                place += 1
        return token_ids, survival

    def _behind(self, demand: Demand, drafted: tuple[int, ...], survival: float) -> _Found:
        """The most promising lookup's tokens behind ``drafted``, which survives with probability ``survival``."""
        best: _Found = ((), ())
        ahead, price = (*demand.ahead, *drafted), demand.row_price / survival
        behind = Demand(demand.request_id, demand.num_tokens - len(drafted), ahead, price)
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
