"""Synthetic arms: requests whose drafts are right with known probabilities, so that regret is exact."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from router.assignment import AssignmentPolicy, Observation, PoolMember, Positions, RequestView, ScoreCounts

DRAFT_LEN = 8
NUM_ROUNDS = 8  # of a slot
ROUND_S = 0.03
SLOT_S = NUM_ROUNDS * ROUND_S
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Arms:
    """``rates[i, j]``: conditional acceptance of drafter j's tokens for request i."""

    rates: Floats
    capacity: int  # of each drafter
    prompt_lens: tuple[int, ...]
    round_s: tuple[float, ...] | None = None  # by drafter; None: ROUND_S with each
    switch_s: float = 0.0  # without drafts, at each change of drafter (SPIN, equation 6)

    @property
    def seconds(self) -> Floats:
        return np.array(self.round_s or (ROUND_S,) * self.rates.shape[1])

    @property
    def goodput(self) -> Floats:
        """(requests, drafters) expected tokens per second, the bonus token included."""
        tokens: Floats = (self.rates[:, :, None] ** np.arange(DRAFT_LEN + 1)).sum(axis=2)
        return tokens / self.seconds

    @property
    def best(self) -> float:
        """Tokens per second of all requests with the best assignment."""
        goodput = np.repeat(self.goodput, self.capacity, axis=1)
        rows, columns = linear_sum_assignment(goodput, maximize=True)
        return float(goodput[rows, columns].sum())

    def pool(self) -> list[PoolMember]:
        return [PoolMember(f"d{j}", self.capacity, 0.01 * (j + 1)) for j in range(self.rates.shape[1])]

    def requests(self) -> list[RequestView]:
        return [RequestView(f"r{i}", length, length, ()) for i, length in enumerate(self.prompt_lens)]


@dataclass(frozen=True)
class Run:
    regret: Floats  # tokens that were missed, up to and with each slot
    goodput: Floats  # tokens per second of all requests, by slot
    num_switches: int


def run(policy: AssignmentPolicy, arms: Arms, num_slots: int, seed: int, full_information: bool = False) -> Run:
    """Slot by slot: assign, observe, learn."""
    random = np.random.default_rng(seed)
    pool, requests, goodput = arms.pool(), arms.requests(), arms.goodput
    gained, plain = np.zeros(num_slots), 1.0 / arms.seconds.min()
    num_switches = 0
    for slot in range(num_slots):
        chains = policy.assign(requests, pool)
        switched = [i for i, r in enumerate(requests) if r.chain and chains[r.request_id] not in (r.chain, ())]
        num_switches += len(switched)
        requests = [replace(r, chain=chains[r.request_id], committed_len=r.committed_len + 16) for r in requests]
        drafted = _drafts(random, arms.rates)
        observations, scores = [], []
        for i, request in enumerate(requests):
            here = int(request.chain[0][1:]) if request.chain else None
            gained[slot] += goodput[i, here] if here is not None else plain
            for j in range(len(pool)) if full_information else () if here is None else (here,):
                if j == here:
                    observations.append(_observation(request, f"d{j}", drafted[i, j], arms.seconds[j]))
                else:
                    scores.append(ScoreCounts(request.request_id, f"d{j}", _positions(drafted[i, j])))
        for i in switched:
            gained[slot] -= arms.switch_s / SLOT_S * (goodput[i, int(requests[i].chain[0][1:])] - plain)
        policy.observe(observations, scores)
    return Run(np.cumsum(arms.best - gained) * SLOT_S, gained, num_switches)


def _drafts(random: np.random.Generator, rates: Floats) -> NDArray[np.int64]:
    """(requests, drafters, rounds) accepted draft tokens."""
    runs = random.geometric(1.0 - rates[:, :, None], size=(*rates.shape, NUM_ROUNDS)) - 1
    return np.minimum(runs, DRAFT_LEN)


def _positions(accepted: NDArray[np.int64]) -> Positions:
    at = np.arange(DRAFT_LEN)
    reached = (accepted[:, None] >= at).sum(axis=0).tolist()
    right = (accepted[:, None] > at).sum(axis=0).tolist()
    return Positions(tuple(reached), tuple(right))


def _observation(request: RequestView, drafter: str, accepted: NDArray[np.int64], round_s: float) -> Observation:
    num_accepted = int(accepted.sum())
    return Observation(
        request.request_id,
        drafter,
        NUM_ROUNDS,
        NUM_ROUNDS * DRAFT_LEN,
        num_accepted,
        NUM_ROUNDS + num_accepted,
        NUM_ROUNDS * round_s,
        _positions(accepted),
    )


def slope_by_doubling(regret: Floats, first: int) -> list[float]:
    """Regret added by each doubling of time, from slot ``first`` on: constant if it grows like log T, doubling if like T."""
    at = [first]
    while at[-1] * 2 <= len(regret):
        at.append(at[-1] * 2)
    return np.diff([regret[t - 1] for t in at]).tolist()
