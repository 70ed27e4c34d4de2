"""Corrects the survival of drafts by their agreement: tokens that several drafters found are right more often."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.acceptance import common_prefix_len
from router.estimates.confidence_scaling import OnlineScaling, num_due
from router.estimates.decayed import LASTING

_MAX_REFERENCES = 4  # drafts that others are compared with; each triples the number of cases
_STEPS = 250
_GRID = np.linspace(0.0, 1.0, _STEPS + 1)
_FIRST_AT_ONCE = 64  # tokens

_MISSING, _SAME, _OTHER = range(3)  # a reference has no token there, the same one, or another


@dataclass(frozen=True, slots=True)
class ComparedDraft:
    conditional: tuple[float, ...]  # confidence of each token, given those before it
    cases: tuple[int, ...]  # comparison of each token with the references
    survival: tuple[float, ...]  # of the prefixes, corrected


class Consensus:
    """The first drafters are the references, with whose drafts all are compared.

    A case is a drafter, whether the token is the first of its draft, and what each reference drafted. Each case has its own
    slope and offset for the log odds (``OnlineScaling``), starting at 1 and 0.
    """

    def __init__(self, num_drafters: int, num_references: int) -> None:
        self.num_references = min(num_references, _MAX_REFERENCES)
        self._num_cases = 3**self.num_references  # of one drafter at one place
        num_all = num_drafters * 2 * self._num_cases
        self._scaling = OnlineScaling(num_all, LASTING)
        self.table = np.tile(_GRID, (num_all, 1))  # corrected confidences, (cases, steps + 1); changed in place
        self._maps: dict[int, list[float]] = {}  # some of its rows, for looking up in Python
        self._pending: list[tuple[int, float, bool]] = []
        self._num_records = 0

    @property
    def num_until_due(self) -> int:
        """Tokens to be recorded before the next learning."""
        return num_due(self._num_records, _FIRST_AT_ONCE) - len(self._pending)

    def compare(
        self, drafter: int, token_ids: Sequence[int], survival: Sequence[float], references: Sequence[tuple[int, ...]]
    ) -> ComparedDraft:
        """Compares a draft, whose prefixes have ``survival``, with those of the references, its own perhaps among them."""
        if not token_ids:
            return ComparedDraft((), (), ())
        cases = self._cases(drafter, token_ids, references)
        conditional, corrected, before, chance = [], [], 1.0, 1.0
        for case, probability in zip(cases, survival, strict=True):
            certain = probability / before if before > 0.0 else 0.0
            before = probability
            scaled = self._maps.get(case)
            if scaled is None:
                scaled = self._maps[case] = self.table[case].tolist()
            chance *= scaled[int(certain * _STEPS + 0.5)]
            conditional.append(certain)
            corrected.append(chance)
        return ComparedDraft(tuple(conditional), tuple(cases), tuple(corrected))

    def record(self, compared: ComparedDraft, num_verified: int, num_right: int) -> None:
        """Records that of the first ``num_verified`` tokens of a draft the first ``num_right`` were right; learned later."""
        for place in range(min(num_right + 1, num_verified, len(compared.conditional))):
            self._pending.append((compared.cases[place], compared.conditional[place], place < num_right))

    def learn_due(self) -> None:
        """Learns from the recorded tokens, once there are enough."""
        if self.num_until_due <= 0:
            self.learn()

    def learn(self, *tokens: NDArray[Any]) -> None:
        """Learns from the recorded tokens and from others: cases, confidences and whether they were right, each [n]."""
        pending = [np.array(column) for column in zip(*self._pending, strict=True)]
        self._pending.clear()
        both = [columns for columns in (pending, tokens) if columns]
        cases, conditional, was_right = (np.concatenate(columns) for columns in zip(*both, strict=True))
        self._num_records += len(cases)
        self._scaling.learn(conditional, cases, was_right)
        changed = np.unique(cases)
        self.table[changed] = self._scaling(_GRID, changed[:, None])
        for case in changed.tolist():
            self._maps.pop(case, None)

    def _cases(self, drafter: int, token_ids: Sequence[int], references: Sequence[tuple[int, ...]]) -> list[int]:
        """Case of each token. A reference that differed before counts as missing behind that token."""
        first, later = drafter * 2 * self._num_cases, (drafter * 2 + 1) * self._num_cases
        cases = [first, *([later] * (len(token_ids) - 1))]
        weight = 1
        for reference, drafted in enumerate(references[: self.num_references]):
            if reference != drafter and drafted:
                num_same = common_prefix_len(token_ids, drafted)
                for place in range(num_same):
                    cases[place] += weight * _SAME
                if num_same < min(len(token_ids), len(drafted)):
                    cases[num_same] += weight * _OTHER
            weight *= 3
        return cases
