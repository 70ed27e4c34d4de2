"""Prompt features that need no model, and clusters of similar prompts."""

from collections.abc import Sequence
from math import log2

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue

NUM_BINS = 16
NUM_FEATURES = NUM_BINS + 2
MAX_COUNT = 200  # prompts that a centre remembers
_MAX_LOG_LEN = 14.0
_HASH = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: neighbouring ids fall far apart
_HASH_BITS = np.uint64(64 - NUM_BINS.bit_length() + 1)


def prompt_features(token_ids: Sequence[int]) -> tuple[float, ...]:
    """NUM_FEATURES numbers from 0 to about 1, close for similar prompts: square roots of the shares of tokens in NUM_BINS
    hash bins (their Euclidean distance is Hellinger's), twice the share of repeated bigrams, and the logarithm of the
    length."""
    tokens = np.asarray(token_ids, np.uint64)
    num_tokens = len(tokens)
    if not num_tokens:
        return (0.0,) * NUM_FEATURES
    with np.errstate(over="ignore"):
        bins = (tokens * _HASH >> _HASH_BITS).astype(np.intp)
    shares = np.sqrt(np.bincount(bins, minlength=NUM_BINS) / num_tokens)
    bigrams = (tokens[:-1] << np.uint64(32)) | tokens[1:]
    repeated = 1.0 - len(np.unique(bigrams)) / len(bigrams) if len(bigrams) else 0.0
    length = min(log2(num_tokens), _MAX_LOG_LEN) / _MAX_LOG_LEN
    return (*(round(share, 4) for share in shares.tolist()), round(2.0 * repeated, 4), round(length, 4))


class ClusterSnapshot(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    centers: list[list[float]]
    counts: list[int]


class PromptClusters:
    """Online k-means (MacQueen): the first ``num_clusters`` prompts are centres, and each later one moves the nearest centre
    by 1 / its count, which is capped at MAX_COUNT."""

    def __init__(self, num_clusters: int) -> None:
        self.num_clusters = num_clusters
        self._centers = np.zeros((0, NUM_FEATURES))
        self._counts: list[int] = []

    def add(self, features: tuple[float, ...]) -> int | None:
        """Learns a prompt; returns its cluster, or None without features."""
        if len(features) != NUM_FEATURES:
            return None
        point = np.array(features)
        nearest = int(((self._centers - point) ** 2).sum(axis=1).argmin()) if self._counts else None
        if nearest is None or (len(self._counts) < self.num_clusters and (self._centers[nearest] != point).any()):
            self._centers = np.vstack([self._centers, point])
            self._counts.append(1)
            return len(self._counts) - 1
        self._counts[nearest] = min(self._counts[nearest] + 1, MAX_COUNT)
        self._centers[nearest] += (point - self._centers[nearest]) / self._counts[nearest]
        return nearest

    def snapshot(self) -> JsonValue:
        return {"centers": np.round(self._centers, 4).tolist(), "counts": list(self._counts)}

    def restore(self, snapshot: JsonValue) -> None:
        """Raises ValueError for an invalid snapshot; nothing is changed then."""
        found = ClusterSnapshot.model_validate(snapshot)
        if len(found.centers) != len(found.counts) or len(found.counts) > self.num_clusters:
            raise ValueError(f"{len(found.centers)} centres with {len(found.counts)} counts, at most {self.num_clusters}")
        if any(len(center) != NUM_FEATURES for center in found.centers) or any(count < 1 for count in found.counts):
            raise ValueError(f"a centre must have {NUM_FEATURES} features and a count of at least 1")
        self._centers = np.array(found.centers).reshape(-1, NUM_FEATURES)
        self._counts = found.counts
