"""A frequency table of the target's likeliest next tokens after the last few, which keeps learning. No torch."""

import math
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cluster.errors import IncompatibleTokenizer, ModelUnavailable
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo
from drafters.protocol import Capabilities, Demand, Draft, salt_key
from drafters.shipped import check_trained_for
from engine.noise import gumbel_of_few

FILE = "table.npz"  # in a drafter's folder
CONTEXT_LENS = (4, 3, 2, 1)  # the longest known context counts
NUM_CANDIDATES = 4  # likeliest tokens kept of a context
_HASH = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_FORMAT = 1

Context = tuple[int, ...]  # the last few tokens


def context_key(context: Sequence[int]) -> int:
    """A 64-bit hash. A context that begins with the token whose id is its length shares the key of the context behind it."""
    key = len(context)
    for token_id in context:
        key = ((key ^ token_id) * _HASH) & _MASK
        key ^= key >> 29
    return key


@dataclass(frozen=True, slots=True)
class FrequencyTable:
    """N contexts with their likeliest next tokens; immutable."""

    keys: NDArray[np.uint64]  # (N,) ascending
    token_ids: NDArray[np.int32]  # (N, 4), likeliest first
    probabilities: NDArray[np.float32]  # (N, 4), 0 where a context has fewer
    vocab_size: int | None = None  # of its target; None: not recorded
    tokenizer_fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def after(self, context: Context) -> list[tuple[int, float]]:
        """(token, probability), likeliest first; empty for an unknown context."""
        key, keys = context_key(context), self.keys.data  # faster than numpy for one number
        row = bisect_left(keys, key)
        if row == len(keys) or keys[row] != key:
            return []
        found = zip(self.token_ids[row].tolist(), self.probabilities[row].tolist(), strict=True)
        return [(token_id, probability) for token_id, probability in found if probability > 0.0]

    def check_serves(self, target: ModelInfo) -> None:
        """Raises IncompatibleTokenizer if its tokens are not the target's."""
        check_trained_for("the frequency table", self.tokenizer_fingerprint, target.tokenizer_fingerprint, target.name)
        largest = int(self.token_ids.max(initial=-1))
        if largest >= target.vocab_size:
            raise IncompatibleTokenizer(
                f"the frequency table holds token {largest}, but {target.name} has only {target.vocab_size} tokens: "
                "train one for this target with `outrider train`"
            )

    def save(self, path: Path) -> None:
        """Probabilities are stored in steps of 1/255."""
        narrow = int(self.token_ids.max(initial=0)) < 2**16
        arrays: dict[str, NDArray[Any]] = {
            "format": np.array(_FORMAT),
            "keys": self.keys,
            "token_ids": self.token_ids.astype(np.uint16 if narrow else np.int32),
            "probabilities": np.rint(self.probabilities * 255).astype(np.uint8),
        }
        target = {"vocab_size": self.vocab_size, "tokenizer_fingerprint": self.tokenizer_fingerprint}
        arrays |= {name: np.array(value) for name, value in target.items() if value is not None}
        np.savez_compressed(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> "FrequencyTable":
        """Raises ModelUnavailable if the file is missing, damaged or no such table."""
        try:
            with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                if int(arrays["format"]) != _FORMAT:
                    raise ModelUnavailable(f"{path.name} has table format {int(arrays['format'])}, not {_FORMAT}")
                table = cls(
                    arrays["keys"].astype(np.uint64),
                    arrays["token_ids"].astype(np.int32),
                    arrays["probabilities"].astype(np.float32) / 255,
                    int(arrays["vocab_size"]) if "vocab_size" in arrays else None,
                    str(arrays["tokenizer_fingerprint"]) if "tokenizer_fingerprint" in arrays else None,
                )
        except (OSError, EOFError, KeyError, TypeError, ValueError, BadZipFile) as error:
            raise ModelUnavailable(f"{path} is not a frequency table: {error}; train one with `outrider train`") from error
        damage = table._damage()
        if damage is not None:
            raise ModelUnavailable(f"{path} is damaged: {damage}; train it again with `outrider train`")
        return table

    def _damage(self) -> str | None:
        shape = (self.keys.size, NUM_CANDIDATES)
        if self.keys.ndim != 1 or self.token_ids.shape != shape or self.probabilities.shape != shape:
            return "its arrays disagree"
        if np.any(self.keys[1:] <= self.keys[:-1]):
            return "its contexts do not ascend"
        largest = int(self.token_ids.max(initial=-1))
        if self.token_ids.min(initial=0) < 0 or (self.vocab_size is not None and largest >= self.vocab_size):
            return "it holds tokens that are not in its vocabulary"
        if not np.all((self.probabilities >= 0.0) & (self.probabilities <= 1.0)):
            return "it holds shares that are no probabilities"
        return None


EMPTY = FrequencyTable(np.zeros(0, np.uint64), np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32))


def count_frequencies(texts: Iterable[tuple[Sequence[int], int]], max_contexts: int, doubt: float = 1.0) -> FrequencyTable:
    """Counts what followed each context in ``texts``: (tokens, length of the prompt, which is not predicted).

    The context one token shorter is a Dirichlet prior of ``doubt`` occurrences: p_n(v) = (c(v) + doubt * p_(n-1)(v)) /
    (total + doubt). Of the contexts seen at least twice, the ``max_contexts`` most frequent are kept.
    """
    counts: defaultdict[Context, Counter[int]] = defaultdict(Counter)
    for token_ids, prompt_len in texts:
        for position in range(max(prompt_len, 1), len(token_ids)):
            for n in CONTEXT_LENS:
                if n <= position:
                    counts[tuple(token_ids[position - n : position])][token_ids[position]] += 1
    shares: dict[Context, dict[int, float]] = {}
    ranked: list[tuple[int, Context]] = []
    for context in sorted(counts, key=len):
        followers = counts[context]
        if (total := followers.total()) < 2:
            continue
        shorter = shares.get(context[1:], {})
        tokens = followers.keys() | shorter.keys()
        mixed = {v: (followers.get(v, 0) + doubt * shorter.get(v, 0.0)) / (total + doubt) for v in tokens}
        shares[context] = dict(sorted(mixed.items(), key=lambda item: (-item[1], item[0]))[:NUM_CANDIDATES])
        ranked.append((total, context))
    ranked.sort(key=lambda item: (-item[0], item[1]))
    rows = sorted((context_key(context), context) for _, context in ranked[:max_contexts])
    rows = [row for i, row in enumerate(rows) if i == 0 or rows[i - 1][0] != row[0]]
    table = FrequencyTable(
        np.array([key for key, _ in rows], np.uint64),
        np.zeros((len(rows), NUM_CANDIDATES), np.int32),
        np.zeros((len(rows), NUM_CANDIDATES), np.float32),
    )
    for i, (_, context) in enumerate(rows):
        for j, (token_id, share) in enumerate(shares[context].items()):
            table.token_ids[i, j], table.probabilities[i, j] = token_id, share
    return table


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
        self._counted = lru_cache(NUM_CACHED)(table.after)
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
