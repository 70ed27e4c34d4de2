"""A frequency table of the target's likeliest next tokens after the last few, which keeps learning. No torch."""

import ctypes
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cluster.errors import IncompatibleTokenizer, ModelUnavailable
from cluster.types import ModelInfo
from drafters.native.lookup import NativeLookup
from drafters.shipped import check_trained_for

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
        except (OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, BadZipFile, zlib.error) as error:
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


MIN_CONFIDENCE = 0.1  # a draft ends before a less probable token


def table_drafter(library: ctypes.CDLL, table: FrequencyTable, max_learned: int) -> NativeLookup:
    """Drafts what the target output after the same last tokens before, sampled with the target's noise. Contexts are learned
    apart for each salt; the least recently used of ``max_learned`` is evicted."""
    arrays = (
        np.ascontiguousarray(table.keys, np.uint64),
        np.ascontiguousarray(table.token_ids, np.int32),
        np.ascontiguousarray(table.probabilities, np.float32),
    )
    at = [one.ctypes.data for one in arrays]
    return NativeLookup(library, "table", len(arrays[0]), *at, max_learned, MIN_CONFIDENCE, keep=arrays)
