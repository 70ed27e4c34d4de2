"""Where three levels win: the least agreement of the middle model with the target, over the cost of its pass, predicted
by the rules that serve (`router.drafter.chains.predict`).

Inner windows are PROPOSAL_LEN. A pass takes as long for many rows as for one, every chain has its best draft length up to
LONGEST, and the small model's agreement with the target is that with the middle times the middle's. SpecRouter prints
neither; its points have costs by parameters (memory-bound passes) and by layers (launches), and the agreements that give
the speed-ups of its table 2.
"""

from collections.abc import Callable
from functools import partial
from math import nan

import numpy as np

from router.cost_model import TableCost
from router.drafter.chains import PROPOSAL_LEN, Level, predict
from simulator.study import Panel

# Of llama-68m and TinyLlama-1.1B, over Llama-2-7b.
PAPERS_COSTS = {"parameters": (0.068 / 6.74, 1.1 / 6.74), "layers": (2 / 32, 22 / 32)}
SMALL_COST = PAPERS_COSTS["parameters"][0]
LONGEST = 8
COSTS = tuple(np.linspace(0.02, 0.8, 27).tolist())
AGREEMENTS = tuple(np.linspace(0.02, 0.98, 49).tolist())
WITH_MIDDLE = (0.6, 0.75, 0.9)  # of the small model


def speedup(*levels: tuple[float, float], batch: int = 1) -> float:
    """Over the target alone. ``levels``: cost and agreement with the next, smallest first."""
    target, last = _flat(1.0), len(levels) - 1

    def per_token_s(window: int) -> float:
        chain = [
            Level(str(i), _flat(cost), window if i == last else PROPOSAL_LEN, (agreement,))
            for i, (cost, agreement) in enumerate(levels)
        ]
        return predict(chain, target, batch).per_token_s

    return 1.0 / min(map(per_token_s, range(1, LONGEST + 1)))


def gain(middle_cost: float, with_target: float, with_middle: float, batch: int = 1) -> float:
    """Of three levels over the fastest of fewer."""
    small, middle = (SMALL_COST, with_middle * with_target), (middle_cost, with_target)
    three = speedup((SMALL_COST, with_middle), middle, batch=batch)
    return three / max(1.0, speedup(small, batch=batch), speedup(middle, batch=batch))


def papers_point(costs: tuple[float, float], two_level: float, three_level: float, batch: int = 1) -> tuple[float, float]:
    """Agreement of the small and of the middle model with the target, of these speed-ups; nan: none gives them."""
    small_cost, middle_cost = costs
    small = _least(lambda one: speedup((small_cost, one), batch=batch), two_level)

    def three(middle: float) -> float:
        return speedup((small_cost, min(1.0, small / middle)), (middle_cost, middle), batch=batch)

    return small, _least(three, three_level)


def panel(batch: int, two_level: float, three_level: float) -> Panel:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for one in WITH_MIDDLE:
        least = [_least(partial(gain, cost, with_middle=one, batch=batch), 1.0) for cost in COSTS]
        series[f"small and middle agree {one:g}"] = list(COSTS), least
    for by, costs in PAPERS_COSTS.items():
        series[f"paper, costs by {by}"] = [costs[1]], [papers_point(costs, two_level, three_level, batch)[1]]
    x = "pass of the middle model over the target's"
    return Panel(f"three levels win above, batch {batch}", series, x, "agreement of middle and target")


def _least(rising: Callable[[float], float], value: float) -> float:
    """The least agreement that exceeds the value; nan: none does."""
    return next((one for one in AGREEMENTS if rising(one) > value), nan)


def _flat(seconds: float) -> TableCost:
    return TableCost((1, 2), (seconds, seconds))
