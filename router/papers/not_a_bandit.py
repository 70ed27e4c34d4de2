"""`hedge`: exponential weights over drafters with full information, matched under capacity. As in
"Not-a-Bandit" (arXiv 2510.20064), drafters in step with a request are judged by every round, without exploration."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, JsonValue

from router.assignment import (
    NO_LEVELS,
    TARGET_ONLY,
    Chain,
    Levels,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
    drafter_of,
    lessons,
    without_lookups,
)
from router.cost_model import Floats, Ints
from router.drafter.seats import FreeCapacity
from router.estimates.acceptance import MEMORY_ROUNDS, AcceptanceModel, AcceptanceSnapshot
from router.estimates.decayed import DecayedSums, ExpiringCache
from router.papers.spin import heaviest_matching

LEARNING_RATE = 10.0  # eta, per token and round
HYSTERESIS = 0.05  # relative gain under which a request stays where it is
PAYBACK_S = 5.0  # within which a switch must recover its cost
_LEAST_GAIN = 1e-6  # minimum gain of a place, relative to its value: free places are always used
_NOWHERE = -1  # as the drafter of a request: none
_Positive = Annotated[float, Field(gt=0)]


class HedgeSnapshot(AcceptanceSnapshot):
    rounds: dict[str, tuple[_Positive, _Positive]]


class Hedge:
    """Each slot, for request i and drafter j:

        v_ij = (1 + s_j (L_ij - 1) + G_ij / (eta n_ij)) / T_j

    - L_ij: expected tokens of a round with a draft (`router.estimates.acceptance`); n_ij: the rounds behind it.
    - s_j: share of rounds in which j's draft is in time (`router.estimates.acceptance`).
    - T_j: mean seconds of a round with j.
    - G_ij: a Gumbel draw fixed for the life of i.

    With drafts in time, i goes to j with probability proportional to exp(eta n_ij L_ij) (Hedge of Freund and Schapire); with
    scarce places this is Hedge's perturbed leader (Kalai and Vempala).

    v is raised by the hysteresis where i is, and lowered elsewhere by the cost of catching up, spread over PAYBACK_S.
    The matching maximises the sum of v. Lookups that an open combination queries anyway are left out
    (`router.assignment.without_lookups`).
    """

    def __init__(
        self,
        *,
        learning_rate: float = LEARNING_RATE,
        hysteresis: float = HYSTERESIS,
        payback_s: float = PAYBACK_S,
        seed: int = 0,
    ) -> None:
        self._learning_rate, self._payback_s = learning_rate, payback_s
        self._stay = 1.0 + hysteresis
        self._random = np.random.default_rng(seed)
        self._acceptance = AcceptanceModel()
        self._noise: ExpiringCache[dict[str, float]] = ExpiringCache()  # request -> its Gumbel draws by drafter
        self._rounds: DecayedSums[str] = DecayedSums(MEMORY_ROUNDS)  # by drafter: rounds, seconds

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        drafted = list(lessons(observations))
        for seen in drafted:
            self._rounds.add(drafter_of(seen.drafter), (seen.num_rounds, seen.elapsed_s), seen.num_rounds)
        self._acceptance.observe(drafted, scores)

    def snapshot(self) -> JsonValue:
        found = {**self._acceptance.snapshot(), "rounds": self._rounds.snapshot()}
        return found if found["acceptance"] or found["in_time"] or found["rounds"] else None

    def restore(self, snapshot: JsonValue) -> None:
        found = HedgeSnapshot.model_validate(snapshot)
        self._acceptance.restore(found)
        self._rounds.sums = dict(found.rounds)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self._acceptance.next_slot([request.request_id for request in requests])
        self._noise.next_slot()
        chains = dict.fromkeys([request.request_id for request in requests], TARGET_ONLY)
        pool = without_lookups(pool, sum([not request.is_placeholder for request in requests]))
        room = FreeCapacity(pool)
        if requests and room.drafters:
            values = self.values(requests, pool, room)
            live = [i for i, request in enumerate(requests) if not request.is_placeholder]
            nums_free = [min(len(live), room.num_free(drafter)) for drafter in room.drafters]
            columns = np.repeat(np.arange(len(room.drafters)), nums_free)
            pairs = zip(*heaviest_matching(values[live][:, columns]), strict=True)
            chains |= room.seat_all((requests[live[i]], room.drafters[columns[place]]) for i, place in pairs)
            for i in set(range(len(requests))).difference(live):
                chains[requests[i].request_id] = self._best_left(values[i], room)
        return chains

    @staticmethod
    def _best_left(values: Floats, room: FreeCapacity) -> Chain:
        """The best drafter with a free place, for requests to come."""
        seats = (room.seat(room.drafters[j], TARGET_ONLY) for j in np.argsort(-values, kind="stable").tolist())
        return next((seat for seat in seats if seat is not None), TARGET_ONLY)

    def values(self, requests: Sequence[RequestView], pool: Sequence[PoolMember], room: FreeCapacity) -> Floats:
        """(requests, drafters): v of a place, in tokens per second above plain decoding."""
        known = [self._noise.get(request.request_id) for request in requests]
        noise = np.array([self._drawn(request, room.drafters) for request in requests])
        lens, num_rounds = self._acceptance.expected_lens([request.request_id for request in requests], room.members)
        lens = 1.0 + self._acceptance.on_time.shares(room.drafters) * (lens - 1.0)
        here = self._here(requests, pool, room)
        left = 1.0 - np.minimum(self._switching(requests, room.members, here) / self._payback_s, 1.0)
        tokens = np.maximum(lens + noise / (self._learning_rate * num_rounds), 0.0) * left
        # A first place is the default, not a choice.
        stays = [i for i, place in enumerate(here.tolist()) if place != _NOWHERE and known[i] is not None]
        tokens[stays, here[stays]] *= self._stay
        round_s = self._round_s(room.members)
        values = tokens / round_s
        plain = 1.0 / round_s.min()  # one token a round, which takes no longer than the shortest
        gains: Floats = np.maximum(values - plain, _LEAST_GAIN * (values + plain))
        return gains

    def _drawn(self, request: RequestView, drafters: Sequence[str]) -> list[float]:
        """The Gumbel draws of a request, 0 for a placeholder: what stands for many requests is not left to chance."""
        draws = self._noise.get(request.request_id)
        if draws is None:
            draws = {}
            self._noise.put(request.request_id, draws)
        for drafter in drafters:
            if drafter not in draws:
                draws[drafter] = self._random.gumbel() if request.committed_len else 0.0
        return [draws[drafter] for drafter in drafters]

    def _round_s(self, members: Sequence[PoolMember]) -> Floats:
        """Seconds of a round with each: the mean of its own, or of all and its prior cost before the first."""
        known = [self._rounds.get(drafter_of(member.name), 2) for member in members]
        num_rounds, seconds = map(sum, zip(*self._rounds.sums.values(), strict=True)) if self._rounds.sums else (1.0, 1.0)
        usual_s = [seconds / num_rounds * (1.0 + member.cost * member.max_draft_len) for member in members]
        return np.array([own_s / num if num else prior for (num, own_s), prior in zip(known, usual_s, strict=True)])

    @staticmethod
    def _here(requests: Sequence[RequestView], pool: Sequence[PoolMember], room: FreeCapacity) -> Ints:
        columns = {drafter: j for j, drafter in enumerate(room.drafters)}
        at: dict[Chain, int] = {(member.name,): columns.get(drafter_of(member.name), _NOWHERE) for member in pool}
        return np.array([at.get(request.chain, _NOWHERE) for request in requests], np.int64)

    @staticmethod
    def _switching(requests: Sequence[RequestView], drafters: Sequence[PoolMember], here: Ints) -> Floats:
        """Seconds of catching up, (requests, drafters); 0 where a request is."""
        fixed = np.array([m.costs.switch_s if m.costs else 0.0 for m in drafters])
        per_token = np.array([m.costs.catch_up_s if m.costs else 0.0 for m in drafters])
        costs: Floats = fixed + np.array([r.committed_len for r in requests])[:, None] * per_token
        stays = np.flatnonzero(here != _NOWHERE)
        costs[stays, here[stays]] = 0.0
        return costs
