"""Measured over predicted time per token, by chain, and the share of drafts that is verified.

Predictions assume a device per model and one shared pass for all requests. Models that share cores slow each other down,
requests with different chains share no pass, and holds expire. The ratio of measured to predicted time counts as far as it
exceeds chance (`router.estimates.round_times`), separately for slots in which all requests had one chain.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import Annotated, Final

import numpy as np
from pydantic import Field, JsonValue

from router.assignment import Chain, Observation, drafter_of
from router.estimates.round_times import FORGOTTEN, MEMORY_SLOTS, Rounds, believed
from router.matching import Floats

_STRENGTH = 8.0  # drafts, all of whose tokens are thought to have been verified, before the first
TRIAL_SLOTS = 10  # that a choice is given before another is made: the first rounds with a drafter catch up, and are no rule

Choice = str | None  # the last drafter that all requests are to be with, "" for the target alone; None: each has its own
SPREAD: Final = None
_Positive = Annotated[float, Field(gt=0)]
_Sum = Annotated[float, Field(ge=0)]
FillSums = dict[str, tuple[_Sum, _Sum]]
OverrunSums = list[tuple[Chain | None, tuple[_Positive, _Positive, _Sum, _Sum]]]


class FillRates:
    """Share of each drafter's longest draft that is verified: lookups are often silent, and not every row pays."""

    def __init__(self, memory_rounds: float) -> None:
        self._memory_rounds = memory_rounds
        self.sums: FillSums = {}  # drafts that were at hand, and their tokens that were verified

    def observe(self, observations: Iterable[Observation]) -> None:
        for seen in observations:
            if seen.num_in_time:
                drafter = drafter_of(seen.drafter)
                drafts, tokens = self.sums.get(drafter, (0.0, 0.0))
                kept = exp(-seen.num_in_time / self._memory_rounds)
                self.sums[drafter] = (drafts * kept + seen.num_in_time, tokens * kept + seen.num_proposed)

    def snapshot(self) -> dict[str, JsonValue]:
        return {drafter: [drafts, tokens] for drafter, (drafts, tokens) in self.sums.items()}

    def of(self, drafter: str, max_draft_len: int) -> float:
        drafts, tokens = self.sums.get(drafter, (0.0, 0.0))
        return min(1.0, (tokens / max_draft_len + _STRENGTH) / (drafts + _STRENGTH))


class ObservedOverheads:
    """Measured over predicted time, by the chain that all requests had, or SPREAD."""

    def __init__(self) -> None:
        self._seconds: dict[Chain | None, Rounds] = {}  # a round is here a second that was foreseen

    def observe(self, compared: Mapping[Chain | None, tuple[float, float]]) -> None:
        """Adds a slot's (predicted, measured) seconds. Entries decay and are dropped in the end."""
        for known in self._seconds.values():
            known.fade(exp(-1.0 / MEMORY_SLOTS))
        for what, (foreseen_s, taken_s) in compared.items():
            if foreseen_s > 0.0:
                self._seconds.setdefault(what, Rounds()).add(foreseen_s, taken_s)
        self._seconds = {what: known for what, known in self._seconds.items() if known.num_slots >= FORGOTTEN}

    def snapshot(self) -> list[JsonValue]:
        return [
            [None if what is SPREAD else list(what), [one.num_slots, one.num_rounds, one.seconds, one.squares]]
            for what, one in self._seconds.items()
        ]

    def restore(self, snapshot: OverrunSums) -> None:
        self._seconds = {what: Rounds(*sums) for what, sums in snapshot}

    def factors(self) -> dict[Chain | None, float]:
        """Measured over predicted time of everything seen."""
        known = list(self._seconds.values())
        off = np.array([one.mean_s - 1.0 for one in known])
        return dict(zip(self._seconds, (1.0 + off * believed(off, known)).tolist(), strict=True))


class DrafterChoice:
    """Whether all requests share one last drafter, and so passes, or each has its fastest."""

    def __init__(self) -> None:
        self._num_slots = TRIAL_SLOTS  # that this choice is old
        self._choice: Choice = SPREAD

    def choose(self, names: Sequence[str], per_token_s: Floats, places: Sequence[int], spread_overrun: float) -> Choice:
        """``per_token_s``: (requests, names); infinite where unavailable. A choice is kept for TRIAL_SLOTS if it stays
        available.

        Each choice is judged by where it would seat requests; a drafter with too few places counts as spread.
        """
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
        best = max(rates, key=rates.__getitem__)
        if best != self._choice and (self._num_slots >= TRIAL_SLOTS or not rates.get(self._choice)):
            self._choice, self._num_slots = best, 0
        return self._choice


def seated(per_token_s: Floats, places: Sequence[int], chosen: int | None, last: Sequence[int] = ()) -> list[int]:
    """Column of each request, 0 being the target alone: the chosen drafter while it has places, else the fastest with one.
    Requests choose in the order of their gain; those in ``last`` choose last.
    """
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
