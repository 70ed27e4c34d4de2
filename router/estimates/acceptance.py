"""The acceptance model: by drafter, draft position and request. A request's rates are shrunk towards the drafter's, these
towards the mean of all drafters:

    L = 1 + s sum over k < draft_len of a_0 a_1 ... a_k        a: acceptance by position, s: share of drafts in time
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from router.assignment import Observation, PoolMember, ScoreCounts, drafter_of
from router.drafter.matching import Floats, Ints
from router.estimates.decayed import DecayedSums
from router.estimates.pool_acceptance import PoolAcceptance, counts_of
from router.estimates.request_acceptance import RequestAcceptance

REQUEST_ROUNDS = 8.0  # of a request's own before they outweigh its drafter's
MEMORY_ROUNDS = 1000.0  # after which an observation of a drafter has faded to 1/e
PRIOR_ROUNDS = 8.0  # assumed in time before the first of a drafter
# Forgetting per round with another drafter, in rounds of its own. A drafter that was left because it was late, or seldom
# queried, is so rated better with time until a request tries it, seldom enough for that to cost little.
_ELSEWHERE = 1 / 16


def _of_those(sums: tuple[float, float]) -> tuple[float, float]:
    rounds, in_time = sums
    if in_time > rounds:
        raise ValueError(f"{in_time} of {rounds} rounds in time")
    return sums


_Sum = Annotated[float, Field(ge=0)]
OnTimeSums = dict[str, Annotated[tuple[_Sum, _Sum], AfterValidator(_of_those)]]


class OnTimeRates(DecayedSums[str]):
    """Share of rounds in which a drafter's draft arrives in time: a late draft is not wrong, but useless. Sums by drafter:
    rounds that could have had a draft, and those that had one."""

    def observe(self, observations: Iterable[Observation]) -> None:
        new = dict.fromkeys(self.sums, (0.0, 0.0))
        for seen in observations:
            drafter = drafter_of(seen.drafter)
            rounds, in_time = new.get(drafter, (0.0, 0.0))
            new[drafter] = (rounds + seen.num_awaited, in_time + seen.num_in_time)
        total = sum(rounds for rounds, _ in new.values())
        for drafter, (rounds, in_time) in new.items():
            self.add(drafter, (rounds, in_time), rounds + _ELSEWHERE * (total - rounds))

    def shares(self, drafters: Sequence[str]) -> Floats:
        """On-time share of each, from 0 to 1."""
        known = np.array([self.get(drafter, 2) for drafter in drafters])
        found: Floats = (known[:, 1] + PRIOR_ROUNDS) / (known[:, 0] + PRIOR_ROUNDS)
        return found


class AcceptanceSnapshot(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    acceptance: dict[str, JsonValue]
    in_time: OnTimeSums


class AcceptanceModel:
    """Learns from drafts and from scores alike. Not thread-safe."""

    def __init__(self, random: np.random.Generator) -> None:
        self._pool = PoolAcceptance(MEMORY_ROUNDS)
        self.on_time = OnTimeRates(MEMORY_ROUNDS)
        self.requests = RequestAcceptance(random)

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts]) -> None:
        """``observations`` as of `lessons`."""
        self.on_time.observe(observations)
        drafts: list[Observation | ScoreCounts] = [*observations, *scores]
        seen = [one for one in drafts if one.positions.num_reached]
        if seen:
            columns = self.columns([one.drafter for one in seen])
            reached, right = counts_of([one.positions for one in seen])
            rows = self.requests.rows_of([one.request_id for one in seen])
            self._pool.add(columns, reached, right)
            self.requests.add(rows, columns, reached, right)

    def columns(self, members: Sequence[str]) -> Ints:
        """The column of each member's drafter."""
        return np.array([self._pool.row(drafter_of(name)) for name in members], np.int64)

    def expected_lens(self, rows: Ints, drafters: Sequence[PoolMember]) -> tuple[Floats, Floats]:
        """Tokens of a round that has its draft, bonus token included, and the rounds behind this; both (rows, drafters)."""
        columns = self.columns([member.name for member in drafters])
        draft_lens = [member.max_draft_len for member in drafters]
        return self.requests.expected_lens(rows, columns, self._pool.means(), REQUEST_ROUNDS, draft_lens)

    def num_drafts(self, drafters: Sequence[PoolMember]) -> Floats:
        """Drafts and scores behind the estimate of each drafter over all requests, as far as they are remembered."""
        return self._pool.num_drafts(self.columns([member.name for member in drafters]))

    def mean_rates(self, drafter: str) -> tuple[float, ...]:
        """Acceptance of a drafter by position, over all requests."""
        row = self._pool.row(drafter)
        return tuple(self._pool.means()[row].tolist())

    def snapshot(self) -> dict[str, JsonValue]:
        """Without requests."""
        return {"acceptance": self._pool.snapshot(), "in_time": self.on_time.snapshot()}

    def restore(self, snapshot: AcceptanceSnapshot) -> None:
        """Raises ValueError for an invalid snapshot; nothing is changed then."""
        self._pool.restore(snapshot.acceptance)
        self.on_time.sums = dict(snapshot.in_time)
        self.requests.clear()
