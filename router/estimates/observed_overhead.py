"""Measured over predicted time per token, by chain.

Predictions assume a device per model and one shared pass for all requests. The ratio counts as far as it exceeds chance
(`router.estimates.round_times`), separately for slots in which all requests had one chain.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import numpy as np
from pydantic import Field, JsonValue

from router.assignment import Chain
from router.drafter.matching import Floats
from router.estimates.round_times import Rounds, SlotSums, significant_share

TRIAL_SLOTS = 10  # that a choice is given before another is made: the first rounds with a drafter catch up, and are no rule

_SPREAD_GAIN = 1.05  # that is predicted before requests are spread: the sum of the best of several estimates is too high

Choice = str | None  # the last drafter that all requests are to be with, "" for the target alone; None: each has its own
SPREAD: Final = None
_Positive = Annotated[float, Field(gt=0)]
_Sum = Annotated[float, Field(ge=0)]
OverheadSums = list[tuple[Chain | None, tuple[_Positive, _Positive, _Sum, _Sum]]]


class ObservedOverheads(SlotSums[Chain | None]):
    """Measured over predicted time, by the chain that all requests had, or SPREAD. A round is here a predicted second."""

    def observe(self, compared: Mapping[Chain | None, tuple[float, float]]) -> None:
        """Adds a slot's (predicted, measured) seconds."""
        self.end_slot({what: seconds for what, seconds in compared.items() if seconds[0] > 0.0})

    def to_json(self) -> list[JsonValue]:
        return [[None if what is SPREAD else list(what), list(sums)] for what, sums in self.sums.items()]

    def factors(self) -> dict[Chain | None, float]:
        """Measured over predicted time of everything seen."""
        known = [Rounds(*sums) for sums in self.sums.values()]
        off = np.array([one.mean_s - 1.0 for one in known])
        return dict(zip(self.sums, (1.0 + off * significant_share(off, known)).tolist(), strict=True))


class DrafterChoice:
    """Whether all requests share one last drafter, and so passes, or each has its fastest."""

    def __init__(self) -> None:
        self._num_slots = TRIAL_SLOTS  # that this choice is old
        self._choice: Choice = SPREAD
        self._is_spread = False  # before the first choice nothing is

    @property
    def is_settled(self) -> bool:
        """Whether the trial of the present choice is over."""
        return self._num_slots >= TRIAL_SLOTS

    def release(self) -> None:
        """Ends the trial: the choice was made before anything was known."""
        self._num_slots = TRIAL_SLOTS

    def choose(self, names: Sequence[str], per_token_s: Floats, places: Sequence[int], spread_overrun: float) -> Choice:
        """The choice for this slot; kept for TRIAL_SLOTS while available, or until spread requests are slower than said.
        Each is judged by where it would seat requests. ``per_token_s``: (requests, names); infinite where unavailable."""
        self._num_slots += 1
        rates: dict[Choice, float] = {}
        each = range(len(per_token_s))
        for choice in (*names, SPREAD):
            column = None if choice is SPREAD else names.index(choice)
            taken = seated(per_token_s, places, column)
            is_spread = len(set(taken)) > 1
            if column is None and not is_spread:
                continue
            can_be_had = column is None or (places[column] > 0 and bool(np.isfinite(per_token_s[:, column]).all()))
            rate = float((1.0 / per_token_s[each, taken]).sum()) if can_be_had else 0.0
            rates[choice] = rate / spread_overrun if is_spread else rate
            if choice is SPREAD and not self._is_spread:
                rates[choice] /= _SPREAD_GAIN
        best = max(rates, key=rates.__getitem__)
        is_slow = self._is_spread and spread_overrun > 1.0
        if best != self._choice and (self.is_settled or is_slow or not rates.get(self._choice)):
            self._choice, self._num_slots, self._is_spread = best, 0, best is SPREAD
        return self._choice


def seated(per_token_s: Floats, places: Sequence[int], chosen: int | None, last: Sequence[int] = ()) -> list[int]:
    """Column of each request, 0 being the target alone: the chosen drafter while it has places, else the fastest with one.
    Requests with the largest gain choose first, those in ``last`` last."""
    seconds = per_token_s.copy()
    if chosen is not None:
        seconds[:, chosen] = 0.0
    gains_s = per_token_s[:, 0] - (per_token_s.min(axis=1) if chosen is None else per_token_s[:, chosen])
    gains_s[list(last)] = -np.inf
    order = np.argsort(seconds, axis=1, kind="stable").tolist()
    free = [len(order), *places[1:]]
    taken = [0] * len(order)
    for i in np.argsort(-gains_s, kind="stable").tolist():
        taken[i] = next(j for j in order[i] if free[j] > 0)
        free[taken[i]] -= 1
    return taken
