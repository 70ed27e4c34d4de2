"""`epsilon-greedy`: mostly the best known drafter, sometimes a random one (SPIN, section VI, second baseline).

SPIN estimates per pool; here the estimate is per request, shrunk to the pool's. SPIN's epsilon is the probability of the
best drafter; here it is that of a random one, so 0.8 is the paper's baseline.
"""

from collections.abc import Mapping, Sequence
from random import Random

from pydantic import JsonValue

from cluster.config import EpsilonGreedyPolicy
from router.assignment import TARGET_ONLY, Chain, Observation, PoolMember, RequestView, ScoreCounts, drafter_of
from router.estimates.goodput import GoodputEstimates
from router.expiring_cache import ExpiringCache
from router.policies.free_capacity import FreeCapacity


class EpsilonGreedy:
    """Per request and slot: with probability epsilon a uniformly random drafter, else the one with the highest estimated
    goodput, if that is better than the present one's by the hysteresis. With scarce places, requests that stay keep theirs;
    then those with the largest gain choose first."""

    def __init__(self, config: EpsilonGreedyPolicy) -> None:
        self._epsilon = config.epsilon
        self._advantage = 1.0 + config.hysteresis  # of staying
        self._estimates = GoodputEstimates(config.memory_rounds, config.prior_rounds)
        self._seen: ExpiringCache[bool] = ExpiringCache()
        self._random = Random(config.seed)

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = ()) -> None:
        self._estimates.observe(observations)

    def snapshot(self) -> JsonValue:
        return self._estimates.snapshot()

    def restore(self, snapshot: JsonValue) -> None:
        self._estimates.restore(snapshot)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self._estimates.next_slot()
        self._seen.next_slot()
        room = FreeCapacity(pool)
        if not room.drafters:
            return {request.request_id: TARGET_ONLY for request in requests}
        shared = self._estimates.of_pool(room.drafters)
        chains: dict[str, Chain] = {}
        explorers: list[RequestView] = []
        movers: list[tuple[float, RequestView, dict[str, float]]] = []
        for request in requests:
            if not request.is_placeholder and self._random.random() < self._epsilon:
                explorers.append(request)
                continue
            here = self._place(request, room)
            values = self._estimates.of_request(request.request_id, shared)
            if here is not None:
                values[here] *= self._advantage
            best = max(values.values())
            seat = room.seat(here, request.chain) if here is not None and values[here] >= best else None
            if seat is not None:
                chains[request.request_id] = seat
            else:
                movers.append((best - (values[here] if here is not None else 0.0), request, values))
        for request in explorers:
            open_to = [drafter for drafter in room.drafters if room.num_free(drafter) > 0]
            drawn = self._random.choice(open_to) if open_to else None
            chains[request.request_id] = (room.seat(drawn, request.chain) if drawn is not None else None) or TARGET_ONLY
        for _, request, values in sorted(movers, key=lambda mover: (mover[1].is_placeholder, -mover[0])):
            chains[request.request_id] = self._best_free(request, values, room)
        return chains

    def _place(self, request: RequestView, room: FreeCapacity) -> str | None:
        """The healthy drafter of the request; None for a newcomer, whose default drafter was not chosen for it."""
        if self._seen.get(request.request_id) is None:
            self._seen.put(request.request_id, True)
            return None
        drafter = drafter_of(request.chain[0]) if len(request.chain) == 1 else None
        return drafter if drafter in room.drafters else None

    @staticmethod
    def _best_free(request: RequestView, values: Mapping[str, float], room: FreeCapacity) -> Chain:
        """The best drafter with a free place; of equals, as at the start, the emptiest."""
        for drafter in sorted(room.drafters, key=lambda drafter: (-values[drafter], -room.free_fraction(drafter))):
            seat = room.seat(drafter, request.chain)
            if seat is not None:
                return seat
        return TARGET_ONLY
