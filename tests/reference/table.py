"""What `drafters/native/table.c` is held to, in Python."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter

import numpy as np

from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft, salt_key
from drafters.table import CONTEXT_LENS, EMPTY, NUM_CANDIDATES, Context, FrequencyTable, context_key
from tests.reference.noise import gumbel_of_few


@dataclass(slots=True)
class _TableSession:
    tail: list[int]  # the last committed tokens, as many as the longest context
    length: int
    sampling: SamplingParams
    salt: int


@dataclass(slots=True)
class _Learned:
    shares: dict[int, float] = field(default_factory=dict)
    total: float = 0.0

    def count(self, token_id: int) -> None:
        for known in self.shares:
            self.shares[known] *= _FADE
        self.total = self.total * _FADE + 1.0
        self.shares[token_id] = self.shares.get(token_id, 0.0) + 1.0
        if len(self.shares) > 2 * NUM_CANDIDATES:
            del self.shares[min(self.shares, key=self.shares.__getitem__)]


_FADE = 0.95
_COUNTED_WEIGHT = 4.0  # of a counted table's shares, in occurrences
NUM_CACHED = 8192  # look-ups in the counted table
_UNKNOWN_WEIGHT = 1.0  # of the doubt in a context that is not in the counted table


def after(table: FrequencyTable, context: Context) -> list[tuple[int, float]]:
    """(token, probability), likeliest first; empty for an unknown context."""
    rows = np.flatnonzero(table.keys == context_key(context))
    pairs = [(table.token_ids[row].tolist(), table.probabilities[row].tolist()) for row in rows]
    return [(token_id, one) for ids, shares in pairs for token_id, one in zip(ids, shares, strict=True) if one > 0.0]


class TableDrafter:
    """Drafts what the target output after the same last tokens before, sampled with the target's noise.

    Contexts are learned apart for each salt.

    Args:
        max_learned: maximum learned contexts, about 570 bytes each; the least recently used is evicted. 0: none.
        min_confidence: a draft ends before a less probable token.
    """

    kind = "table"
    capabilities = Capabilities()

    def __init__(self, table: FrequencyTable = EMPTY, max_learned: int = 50_000, min_confidence: float = 0.1) -> None:
        self._arrays = (
            np.ascontiguousarray(table.keys, np.uint64),
            np.ascontiguousarray(table.token_ids, np.int32),
            np.ascontiguousarray(table.probabilities, np.float32),
        )
        self._max_learned = max_learned
        self._min_confidence = min_confidence
        self._counted = lru_cache(NUM_CACHED)(partial(after, table))
        self._learned: OrderedDict[tuple[int, Context], _Learned] = OrderedDict()
        self._sessions: dict[str, _TableSession] = {}

    @property
    def settings(self) -> tuple[float, ...]:
        """As of ``drafters.native.lookup.Lookup``."""
        at = [one.ctypes.data for one in self._arrays]
        return len(self._arrays[0]), *at, self._max_learned, self._min_confidence

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._sessions[request_id] = _TableSession(
            list(token_ids[-CONTEXT_LENS[0] :]), len(token_ids), sampling, salt_key(salt)
        )

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        session = self._sessions[request_id]
        text = [*session.tail, *token_ids]
        if self._max_learned:
            for position in range(len(session.tail), len(text)):
                self._learn(text, position, session.salt)
        session.tail = text[-CONTEXT_LENS[0] :]
        session.length += len(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        self._sessions.pop(request_id, None)

    def check_integrity(self) -> None:
        assert len(self._learned) <= self._max_learned, "more contexts were learned than there is room for"
        assert all(0 < len(one.tail) <= CONTEXT_LENS[0] for one in self._sessions.values()), "a tail of the wrong length"

    def _learn(self, text: Sequence[int], position: int, salt: int) -> None:
        for n in CONTEXT_LENS[:-1]:  # single tokens have too many continuations
            if n <= position:
                context = (salt, tuple(text[position - n : position]))
                learned = self._learned.get(context)
                if learned is None:
                    learned = self._learned[context] = _Learned()
                else:
                    self._learned.move_to_end(context)
                learned.count(text[position])
        while len(self._learned) > self._max_learned:
            self._learned.popitem(last=False)

    def _draft(self, demand: Demand) -> Draft:
        session = self._sessions[demand.request_id]
        text = [*session.tail, *demand.ahead]
        position = session.length + len(demand.ahead)
        token_ids: list[int] = []
        confidences: list[float] = []
        survival = 1.0
        while len(token_ids) < demand.num_tokens:
            candidates = self._candidates(text, session.salt)
            if not candidates:
                break
            token_id, confidence = _choose(candidates, session.sampling, position)
            survival *= confidence
            if confidence < self._min_confidence or (token_ids and survival < demand.terms.least_survival):
                break
            token_ids.append(token_id)
            confidences.append(confidence)
            text.append(token_id)
            position += 1
        return Draft(demand.request_id, tuple(token_ids), tuple(confidences))

    def _candidates(self, text: Sequence[int], salt: int) -> list[tuple[int, float]]:
        for n in CONTEXT_LENS:
            if n > len(text):
                continue
            context = tuple(text[-n:])
            counted = self._counted(context)
            learned = self._learned.get((salt, context))
            if learned is None:
                if counted:
                    return counted
                continue
            weight = _COUNTED_WEIGHT if counted else _UNKNOWN_WEIGHT
            shares = {token_id: weight * share for token_id, share in counted}
            for token_id, share in learned.shares.items():
                shares[token_id] = shares.get(token_id, 0.0) + share
            return [(token_id, share / (weight + learned.total)) for token_id, share in shares.items()]
        return []


def _choose(candidates: Sequence[tuple[int, float]], sampling: SamplingParams, position: int) -> tuple[int, float]:
    """The candidate that the target's rule would choose if these were its probabilities."""
    if sampling.temperature == 0.0 or len(candidates) == 1:
        return max(candidates, key=itemgetter(1))
    noise = gumbel_of_few(sampling.seed, position, [token_id for token_id, _ in candidates])
    logs = [math.log(share) if share else -math.inf for _, share in candidates]  # learned counts may fade to 0
    scores = [log / sampling.temperature + g for log, g in zip(logs, noise, strict=True)]
    return candidates[scores.index(max(scores))]
