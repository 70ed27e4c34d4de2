"""Corrects the survival of drafts by their agreement.

A calibrated confidence is the rate at which a drafter is right. Given other drafts of the same round that rate changes:
tokens that several drafters found independently are right more often, and of two different tokens at least one is wrong. The
correction per token is learned from verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafters.replay import common_prefix_len
from router.estimates.confidence_scaling import Floats, OnlineScaling, num_due

_NUM_WITNESSES = 4  # drafts that others are compared with, at most: each makes three times as many cases
_MEMORY = 500.0  # tokens of a case that count
_STEPS = 250
_GRID = np.linspace(0.0, 1.0, _STEPS + 1)
_FIRST_AT_ONCE = 64  # tokens

_SILENT, _SAME, _OTHER = range(3)  # a witness says nothing of a token, drafted it too, or another in its place


@dataclass(frozen=True, slots=True)
class ComparedDraft:
    """One draft. ``told``: confidence of each token, given those before it; ``cases``: its comparison with the witnesses;
    ``survival``: of its prefixes, corrected.
    """

    told: tuple[float, ...]
    cases: tuple[int, ...]
    survival: tuple[float, ...]


class Consensus:
    """The first drafters of a round are the witnesses: they draft for every request, and all drafts are compared with
    theirs.

    A case is a drafter, whether the token is the first of its draft, and what each witness drafted. Each case has its own
    slope and offset for the log odds (``OnlineScaling``), starting at 1 and 0.
    """

    def __init__(self, num_drafters: int, num_witnesses: int) -> None:
        self.num_witnesses = min(num_witnesses, _NUM_WITNESSES)
        self._num_cases = 3**self.num_witnesses  # of one drafter at one place
        num_all = num_drafters * 2 * self._num_cases
        self._scaling = OnlineScaling(num_all, _MEMORY)
        self.table = np.tile(_GRID, (num_all, 1))  # what was told means; (cases, steps + 1), changed in place
        self._maps: dict[int, list[float]] = {}  # the same of some, for looking up in Python
        self._pending: list[tuple[int, float, bool]] = []
        self._num_records = 0

    @property
    def num_missing(self) -> int:
        """Tokens still to be recorded before all are learned together."""
        return num_due(self._num_records, _FIRST_AT_ONCE) - len(self._pending)

    def weigh(
        self, drafter: int, token_ids: Sequence[int], survival: Sequence[float], witnesses: Sequence[tuple[int, ...]]
    ) -> ComparedDraft:
        """Compares a draft.

        Args:
            drafter: its number; of a witness its place among them.
            survival: of the draft's prefixes, never rising.
            witnesses: their drafts, its own among them if it is one.
        """
        if not token_ids:
            return ComparedDraft((), (), ())
        cases = self._cases(drafter, token_ids, witnesses)
        told, corrected, before, chance = [], [], 1.0, 1.0
        for case, probability in zip(cases, survival, strict=True):
            certain = probability / before if before > 0.0 else 0.0
            before = probability
            scaled = self._maps.get(case)
            if scaled is None:
                scaled = self._maps[case] = self.table[case].tolist()
            chance *= scaled[round(certain * _STEPS)]
            told.append(certain)
            corrected.append(chance)
        return ComparedDraft(tuple(told), tuple(cases), tuple(corrected))

    def record(self, testimony: ComparedDraft, num_verified: int, num_right: int) -> None:
        """Records that of the first ``num_verified`` tokens of a draft the first ``num_right`` were right; learned later."""
        for place in range(min(num_right + 1, num_verified, len(testimony.told))):
            self._pending.append((testimony.cases[place], testimony.told[place], place < num_right))

    def take_up(self) -> None:
        """Learns what was recorded, once there is enough."""
        if self.num_missing <= 0:
            self.learn(*self._taken())

    def learn(self, cases: NDArray[np.intp], told: Floats, came_true: NDArray[np.bool_]) -> None:
        """Learns from tokens, each [n]: case, confidence, and whether it was right; and from what was recorded."""
        if self._pending:
            pending = self._taken()
            cases, told, came_true = (np.concatenate(pair) for pair in zip(pending, (cases, told, came_true), strict=True))
        self._num_records += len(cases)
        self._scaling.learn(told, cases, came_true)
        changed = np.unique(cases)
        self.table[changed] = self._scaling(_GRID, changed[:, None])
        for case in changed.tolist():
            self._maps.pop(case, None)

    def _taken(self) -> tuple[NDArray[np.intp], Floats, NDArray[np.bool_]]:
        cases, told, came_true = (np.array(column) for column in zip(*self._pending, strict=True))
        self._pending.clear()
        return cases, told, came_true

    def _cases(self, drafter: int, token_ids: Sequence[int], witnesses: Sequence[tuple[int, ...]]) -> list[int]:
        """Case of each token. A witness that differed before counts as silent behind that token."""
        first, later = drafter * 2 * self._num_cases, (drafter * 2 + 1) * self._num_cases
        cases = [first, *([later] * (len(token_ids) - 1))]
        weight = 1
        for witness, drafted in enumerate(witnesses[: self.num_witnesses]):
            if witness != drafter and drafted:
                num_same = common_prefix_len(token_ids, drafted)
                for place in range(num_same):
                    cases[place] += weight * _SAME
                if num_same < min(len(token_ids), len(drafted)):
                    cases[num_same] += weight * _OTHER
            weight *= 3
        return cases
