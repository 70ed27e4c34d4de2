"""Which compute partition a target and the drafters on its device use: all of it by turns, or a part each (FASER, 4.3).

With t_v(b, r) and t_d(b, 1 - r) the profiled times of a pass and of drafts for b requests, where the target has the share r
of the device (FASER, equations 11 and 12), a round of B requests takes

    t_v(B, 1) + t_d(B, 1)                                     on the whole device, by turns
    max(2 t_v(B/2, r), t_v(B/2, r) + t_d(B/2, 1 - r))         in parts: one half is drafted for while the other is verified
"""

from collections.abc import Callable, Mapping, Sequence

from router.cost_model import CostModel

WHOLE = ""  # by turns on the whole device
_MARGIN = 0.05  # by which another must be better
_PATIENCE = 16  # in so many choices in a row, since a change waits for the device


class PartitionChoice:
    """``costs``: profiled, by partition; others are not chosen. None: not profiled, and the only one. ``drafters``: on the
    target's device, with the length of their drafts."""

    def __init__(self, costs: Mapping[str, CostModel | None], drafters: Mapping[str, int]) -> None:
        self.costs = {name: cost for name, cost in costs.items() if cost is not None}
        self._drafters = dict(drafters)
        self.current = min(costs)  # WHOLE if it is one
        self._challenger, self._num_better = self.current, 0

    def choose(self, batch: int, num_context: Callable[[], int]) -> str:
        """Of the next round, of ``batch`` requests that attend to ``num_context`` tokens."""
        if len(self.costs) < 2 or not batch:
            return self.current
        context = num_context()
        seconds = {name: self._round_s(name, batch, context) for name in self.costs}
        best = min(seconds, key=lambda name: (seconds[name], name))
        if seconds[best] >= (1.0 - _MARGIN) * seconds[self.current]:
            self._num_better = 0
            return self.current
        self._num_better = self._num_better + 1 if best == self._challenger else 1
        self._challenger = best
        if self._num_better >= _PATIENCE:
            self.current, self._num_better = best, 0
        return self.current

    def _round_s(self, name: str, batch: int, num_context: int) -> float:
        cost = self.costs[name]
        apart_s = sum(_times(cost, self._drafters, batch, num_context))
        if name == WHOLE or batch == 1:
            return apart_s
        pass_s, draft_s = _times(cost, self._drafters, -(-batch // 2), num_context // 2)
        return min(apart_s, max(2.0 * pass_s, pass_s + draft_s))


def _times(cost: CostModel, drafters: Mapping[str, int], batch: int, num_context: int) -> Sequence[float]:
    """Of a pass that verifies whole drafts, and of the drafts of the slowest drafter."""
    draft_s = max((cost.draft_s(name, batch, length) or 0.0 for name, length in drafters.items()), default=0.0)
    return cost.step_s(batch * (1 + max(drafters.values(), default=0)), num_context), draft_s
