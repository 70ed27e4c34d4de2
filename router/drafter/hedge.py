"""`hedge`: exponential weights over drafters with full information, matched under capacity (the default). As in
"Not-a-Bandit" (arXiv 2510.20064), drafters in step with a request are judged by every round, without exploration."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
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
from router.drafter.matching import NOWHERE, Floats, Ints, match
from router.drafter.seats import FreeCapacity
from router.estimates.acceptance import AcceptanceModel, AcceptanceSnapshot
from router.estimates.round_times import RoundTimes, shares_target

LEARNING_RATE = 10.0  # eta, per token and round
HYSTERESIS = 0.05  # relative gain under which a request stays where it is
EXPLORATION = 0.01  # share of requests, per slot, that try a drafter with little evidence
PAYBACK_S = 5.0  # within which a switch must recover its cost
MAX_CYCLES = 64  # of a slot's matching: what is left to gain then is little, and the next slot begins nearer to it
_MAX_PRICES = 8  # of a slot, of drafters that the requests with them pay for together
_OPTIMISTIC_DRAFTS = 4  # right in full, that a drafter is credited with before its own (Sutton and Barto, section 2.6)
_MAX_TRIALS = 4  # requests of a slot that try the same drafter
_LEAST_GAIN = 1e-6  # minimum gain of a place, relative to its value: free places are always used
_Positive = Annotated[float, Field(gt=0)]
_Sum = Annotated[float, Field(ge=0)]
_Times = dict[str, tuple[_Positive, _Positive, _Sum, _Sum]]


class HedgeSnapshot(AcceptanceSnapshot):
    rounds: _Times


class Hedge:
    """Each slot, for request i and drafter j:

        v_ij = (1 + s_j (L_ij - 1) + G_ij / (eta n_ij)) / T_j

    - L_ij: expected tokens of a round with a draft (`router.estimates.acceptance`); n_ij: the rounds behind it.
    - s_j: share of rounds in which j's draft is in time (`router.estimates.acceptance`).
    - T_j: seconds of a round if all requests were with j (`router.estimates.round_times`).
    - G_ij: a Gumbel draw fixed for the life of i.

    With drafts in time, i goes to j with probability proportional to exp(eta n_ij L_ij) (Hedge of Freund and Schapire); with
    scarce places this is Hedge's perturbed leader (Kalai and Vempala).

    A drafter that nobody scores is known by its drafts alone. A request tries it while its optimistic value exceeds the best
    value: the optimistic one is as if _OPTIMISTIC_DRAFTS drafts more, of all requests, had been right in full (optimistic
    initial values), and catching up lowers it, too. What is slow, late or seldom right is so left after few drafts. Later a
    small share of requests explores for a slot the drafter that they have seen least.

    v is raised by the hysteresis where i is, and lowered elsewhere by the cost of catching up, spread over PAYBACK_S.
    The matching maximises the sum of v (`router/drafter/matching.py`), starting from the prices of the last slot. Lookups
    that an open combination queries anyway are left out (`router.assignment.without_lookups`).
    """

    def __init__(
        self,
        *,
        learning_rate: float = LEARNING_RATE,
        hysteresis: float = HYSTERESIS,
        exploration: float = EXPLORATION,
        payback_s: float = PAYBACK_S,
        seed: int = 0,
    ) -> None:
        self._learning_rate, self._exploration, self._payback_s = learning_rate, exploration, payback_s
        self._stay = 1.0 + hysteresis
        self._acceptance = AcceptanceModel(np.random.default_rng(seed))
        self._times = RoundTimes()
        self._prices: dict[str, float] = {}
        self._regret: float | None = None

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        drafted = list(lessons(observations))
        self._times.observe(drafted)
        self._acceptance.observe(drafted, scores)

    def regret(self) -> float | None:
        return self._regret

    def snapshot(self) -> JsonValue:
        found = {**self._acceptance.snapshot(), "rounds": self._times.snapshot()}
        return found if found["acceptance"] or found["in_time"] or found["rounds"] else None

    def restore(self, snapshot: JsonValue) -> None:
        found = HedgeSnapshot.model_validate(snapshot)
        self._acceptance.restore(found)
        self._times.restore(found.rounds)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self._acceptance.requests.next_slot()
        chains = dict.fromkeys([request.request_id for request in requests], TARGET_ONLY)
        pool = without_lookups(pool, sum([not request.is_placeholder for request in requests]))
        room = FreeCapacity(pool)
        self._regret = None
        if requests and room.drafters:
            rows = self._acceptance.requests.follow(requests)
            values, rewards = self._values(requests, rows, pool, room)
            capacity = np.array([room.num_free(drafter) for drafter in room.drafters])
            prices = np.array([self._prices.get(drafter, 0.0) for drafter in room.drafters])
            live = np.array([not request.is_placeholder for request in requests])
            matching = match(values[live], capacity, prices, MAX_CYCLES)
            self._prices = dict(zip(room.drafters, matching.prices.tolist(), strict=True))
            places = matching.place.tolist()
            if places:
                chosen = rewards[live][np.arange(len(places)), matching.place]  # NOWHERE is the last column
                self._regret = 1.0 - float(chosen.sum() / rewards[live].max(axis=1).sum())
            pairs = zip([request for request in requests if not request.is_placeholder], places, strict=True)
            chains |= room.seat_all((request, room.drafters[j]) for request, j in pairs if j != NOWHERE)
            for i in np.flatnonzero(~live).tolist():
                chains[requests[i].request_id] = self._best_left(values[i], matching.prices, room)
        return chains

    @staticmethod
    def _best_left(values: Floats, prices: Floats, room: FreeCapacity) -> Chain:
        """The best drafter with a free place, for requests to come. Prices count, since those requests would pay them
        too."""
        for j in np.argsort(prices - values, kind="stable").tolist():
            seat = room.seat(room.drafters[j], TARGET_ONLY)
            if seat is not None:
                return seat
        return TARGET_ONLY

    def _values(
        self, requests: Sequence[RequestView], rows: Ints, pool: Sequence[PoolMember], room: FreeCapacity
    ) -> tuple[Floats, Floats]:
        """(requests, drafters): value of a place above plain decoding; (requests, drafters and none): tokens per second as
        they are estimated, without what makes requests stay or explore."""
        own, columns = self._acceptance.requests, self._acceptance.columns(room.drafters)
        lens, num_rounds = self._acceptance.expected_lens(rows, room.members)
        shares = self._acceptance.on_time.shares(room.drafters)
        num_drafts = self._acceptance.num_drafts(room.members)
        optimistic = 1.0 + shares * (self._optimistic_lens(lens, num_drafts, room.members) - 1.0)
        lens = 1.0 + shares * (lens - 1.0)
        noise = own.noise(rows, columns) / (self._learning_rate * num_rounds)
        here = self._here(requests, pool, room)
        placed = own.place(rows)
        left = 1.0 - np.minimum(self._switching(requests, room.members, here) / self._payback_s, 1.0)
        tokens = np.maximum(lens + noise, 0.0) * left
        stays = np.flatnonzero(placed & (here != NOWHERE))
        tokens[stays, here[stays]] *= self._stay
        live = np.array([request.committed_len > 0 for request in requests])
        round_s = self._round_s(room, shares, tokens[live])
        values = tokens / round_s
        explorers = own.draw_explorers(live, num_rounds, num_drafts, self._exploration)
        for tries, drafters in (self._trials(values, optimistic * left / round_s, here, live), explorers):
            values[tries, drafters] = self._stay * values[tries].max(axis=1)
        plain = 1.0 / round_s.min()  # one token a round, which takes no longer than the shortest
        gains: Floats = np.maximum(values - plain, _LEAST_GAIN * (values + plain))
        return gains, np.column_stack((lens / round_s, np.full(len(requests), plain)))

    def _round_s(self, room: FreeCapacity, shares: Floats, tokens: Floats) -> Floats:
        """Seconds of a round with each. Time drafted in the target's process is shared by the requests with that drafter: by
        all at first, then by those who prefer it at that price, until their number stops falling."""
        copies = [room.num_copies(drafter) for drafter in room.drafters]
        num_requests = max(1, len(tokens))
        users = np.full(len(room.members), float(num_requests))
        shared = np.array([shares_target(member) for member in room.members])
        for _ in range(_MAX_PRICES):
            round_s = self._times.of(room.members, copies, shares, users, num_requests)
            takers = np.bincount((tokens / round_s).argmax(axis=1), minlength=len(room.members))
            fewer = np.where(shared, np.clip(takers, 1.0, users), users)
            if (fewer == users).all():
                break
            users = fewer
        return round_s

    @staticmethod
    def _optimistic_lens(lens: Floats, num_drafts: Floats, drafters: Sequence[PoolMember]) -> Floats:
        """(requests, drafters): ``lens`` if _OPTIMISTIC_DRAFTS more drafts were right in full."""
        longest = np.array([1.0 + member.max_draft_len for member in drafters])
        optimistic: Floats = (num_drafts * lens + _OPTIMISTIC_DRAFTS * longest) / (num_drafts + _OPTIMISTIC_DRAFTS)
        return optimistic

    def _trials(self, values: Floats, optimistic: Floats, here: Ints, live: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Requests for which a drafter's optimistic value exceeds the best value, and the drafter of each whose optimistic
        value is highest: at most _MAX_TRIALS requests for a drafter, those first that are there."""
        most = optimistic.argmax(axis=1)
        tries = live & (optimistic.max(axis=1) > values.max(axis=1)) & (self._exploration > 0.0)
        for j in np.unique(most[tries]).tolist():
            some = np.flatnonzero(tries & (most == j))
            tries[some[np.argsort(here[some] != j, kind="stable")][_MAX_TRIALS:]] = False
        chosen = np.flatnonzero(tries)
        return chosen, most[chosen]

    @staticmethod
    def _here(requests: Sequence[RequestView], pool: Sequence[PoolMember], room: FreeCapacity) -> Ints:
        columns = {drafter: j for j, drafter in enumerate(room.drafters)}
        at: dict[Chain, int] = {(member.name,): columns.get(drafter_of(member.name), NOWHERE) for member in pool}
        return np.array([at.get(request.chain, NOWHERE) for request in requests], np.int64)

    @staticmethod
    def _switching(requests: Sequence[RequestView], drafters: Sequence[PoolMember], here: Ints) -> Floats:
        """Seconds of catching up, (requests, drafters); 0 where a request is."""
        fixed = np.array([m.costs.switch_s if m.costs else 0.0 for m in drafters])
        per_token = np.array([m.costs.catch_up_s if m.costs else 0.0 for m in drafters])
        if not fixed.any() and not per_token.any():
            return np.zeros((1, 1))
        costs: Floats = fixed + np.array([r.committed_len for r in requests])[:, None] * per_token
        stays = np.flatnonzero(here != NOWHERE)
        costs[stays, here[stays]] = 0.0
        return costs
