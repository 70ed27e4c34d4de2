"""Assignment of requests to drafters of bounded capacity that maximises the sum of values.

A transportation problem with drafters as sinks: a graph of nine nodes for a thousand requests and eight drafters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOWHERE = -1
NUM_SWEEPS = 8
_SETTLED = 0.01  # change of the prices in a sweep, under which there is no need of another
MAX_CYCLES = 65_536  # each improves the sum; a matching from scratch of 1,000 requests takes some hundreds at the most
_EPSILON = 1e-9  # of the largest value: what counts as an improvement


@dataclass(frozen=True, slots=True)
class Matching:
    """``place[i]``: the drafter of request i, or NOWHERE. ``prices[j]``: the value of one more place at drafter j."""

    place: Ints
    prices: Floats


def match(values: Floats, capacity: Ints, prices: Floats | None = None, max_cycles: int = MAX_CYCLES) -> Matching:
    """Places that maximise the sum of ``values``, where no place is worth 0 (SPIN's problem (10)-(12)).

    At given prices a request prefers the drafter with the largest value - price; the surplus of a full drafter goes where it
    loses least. Remaining gains are positive cycles of moves between drafters: without any, the matching is optimal (Klein
    1967), and the potentials of the graph are supporting prices.

    ``values``: (requests, drafters); only positive ones are chosen. ``prices``: of a similar matching. Beyond
    ``max_cycles``, a bound of the time, the matching is not optimal and keeps its prices.
    """
    num_requests, num_drafters = values.shape
    if not num_requests or not num_drafters:
        return Matching(np.full(num_requests, NOWHERE, np.int64), np.zeros(num_drafters))
    worth = np.zeros((num_requests, num_drafters + 1))  # the last column: going without
    worth[:, :num_drafters] = np.where((values > 0.0) & (capacity > 0), values, -np.inf)
    wanted = worth.argmax(axis=1)
    if (np.bincount(wanted, minlength=num_drafters + 1)[:num_drafters] <= capacity).all():
        return Matching(_or_nowhere(wanted, num_drafters), np.zeros(num_drafters))
    limits = np.append(capacity, num_requests)
    start = _sweep(worth, limits, np.zeros(num_drafters) if prices is None else prices)
    place = _seat(worth, limits, start)
    found = _improve(worth, limits, place, max_cycles)
    return Matching(_or_nowhere(place, num_drafters), start[:-1] if found is None else found)


def _or_nowhere(place: Ints, num_drafters: int) -> Ints:
    return np.where(place == num_drafters, NOWHERE, place)


def _sweep(worth: Floats, limits: Ints, known: Floats) -> Floats:
    """Near-clearing prices: sets each drafter's price in turn to where demand equals capacity."""
    num_requests = len(worth)
    prices = np.append(known, 0.0)
    worth = np.ascontiguousarray(worth.T)  # a maximum over a few long rows takes a tenth of that over many short ones
    net = worth - prices[:, None]
    scarce = np.flatnonzero(limits[:-1] < num_requests).tolist()
    for _ in range(NUM_SWEEPS):
        before = prices.copy()
        for j in scarce:
            net[j] = -np.inf
            bids = worth[j] - net.max(axis=0)
            limit = limits[j]
            prices[j] = max(0.0, -np.partition(-bids, limit)[limit])
            net[j] = worth[j] - prices[j]
        if np.abs(prices - before).max() <= _SETTLED * np.abs(prices).max():
            break
    return prices


def _seat(worth: Floats, limits: Ints, prices: Floats) -> Ints:
    """Seats every request at its preferred drafter at these prices, or at the next best with a free place."""
    net = worth - prices
    free = limits.copy()
    place = np.full(len(worth), NOWHERE, np.int64)
    standing = np.arange(len(worth))
    while len(standing):
        wanted = net[standing].argmax(axis=1)
        best = net[standing, wanted]
        others = net[standing].copy()
        others[np.arange(len(standing)), wanted] = -np.inf
        urgency = best - others.max(axis=1)
        order = np.lexsort((-urgency, wanted))
        rank = np.arange(len(order)) - np.searchsorted(wanted[order], wanted[order])
        seated = rank < free[wanted[order]]
        chosen = order[seated]
        place[standing[chosen]] = wanted[chosen]
        free -= np.bincount(wanted[chosen], minlength=len(limits))
        standing = standing[np.sort(order[~seated])]
        net[:, free <= 0] = -np.inf
    return place


def _improve(worth: Floats, limits: Ints, place: Ints, max_cycles: int) -> Floats | None:
    """Moves requests along positive cycles, in place; returns the drafters' prices. ``gain[a, b]``: the largest gain of
    moving a request from a to b; at least 0 where a has a free place."""
    num_places = len(limits)
    epsilon = _EPSILON * max(1.0, float(np.abs(worth[np.isfinite(worth)]).max()))
    gain = np.full((num_places, num_places), -np.inf)
    mover = np.full((num_places, num_places), NOWHERE)
    free = limits - np.bincount(place, minlength=num_places)
    touched: Sequence[int] = range(num_places)
    for _ in range(max_cycles):
        for a in touched:
            members = np.flatnonzero(place == a)
            gain[a], mover[a] = -np.inf, NOWHERE
            if len(members):
                gains = worth[members] - worth[members, a, None]
                first = gains.argmax(axis=0)
                gain[a], mover[a] = gains[first, np.arange(num_places)], members[first]
            if free[a] > 0:
                mover[a, gain[a] < 0.0] = NOWHERE
                gain[a] = np.maximum(gain[a], 0.0)
            gain[a, a] = -np.inf
        cycle, potentials = _positive_cycle(gain, epsilon)
        if not cycle:
            prices: Floats = np.maximum(potentials[:-1] - potentials[-1], 0.0)
            return prices
        for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            if mover[a, b] != NOWHERE:
                place[mover[a, b]] = b
        free = limits - np.bincount(place, minlength=num_places)
        touched = cycle
    return None


def _positive_cycle(gain: Floats, epsilon: float) -> tuple[list[int], Floats]:
    """A cycle with a positive sum of gains, else the largest gain of a path to each node (Bellman, Ford)."""
    num_nodes = len(gain)
    reach = np.zeros(num_nodes)
    parent = np.full(num_nodes, NOWHERE)
    nodes = np.arange(num_nodes)
    for _ in range(num_nodes):
        sums = reach[:, None] + gain
        source = sums.argmax(axis=0)
        best = sums[source, nodes]
        better = best > reach + epsilon
        if not better.any():
            return [], reach
        reach = np.where(better, best, reach)
        parent[better] = source[better]
    node = int(np.flatnonzero(better)[0])
    for _ in range(num_nodes):
        node = int(parent[node])
    cycle = [node]
    while (node := int(parent[node])) != cycle[0]:
        cycle.append(node)
    return cycle[::-1], reach
