"""Acceptance over all requests: shrinkage, forgetting, and clusters of prompts."""

import numpy as np
import pytest

from router.assignment import Positions
from router.drafter.matching import NOWHERE
from router.drafter.prompt_features import NUM_FEATURES, PromptClusters, prompt_features
from router.estimates.pool_acceptance import CONTEXT_LENS, NUM_POSITIONS, PoolAcceptance, counts_of


def table(strength: float = 20.0, memory: float = 1e6) -> PoolAcceptance:
    return PoolAcceptance(num_clusters=4, strength=strength, memory=memory)


def learn(known: PoolAcceptance, drafter: str, positions: Positions, cluster: int = NOWHERE, context_len: int = 0) -> None:
    at = (np.array([known.row(drafter)]), np.array([cluster]), np.array([context_len]))
    known.add(*at, *counts_of([positions]))


def rate(known: PoolAcceptance, drafter: str, cluster: int = NOWHERE, context_len: int = 0) -> float:
    """At the first position."""
    row = known.row(drafter)
    return float(known.means()[row, 1 + cluster, np.searchsorted(CONTEXT_LENS, context_len, side="right"), 0])


def drafts(right: float, num: int) -> Positions:
    """``num`` drafts of any length, of which each token is right at rate ``right``."""
    at = np.arange(NUM_POSITIONS)
    return Positions(tuple(round(num * right**i) for i in at), tuple(round(num * right ** (i + 1)) for i in at))


def test_positions_count_what_was_reached_and_what_was_right() -> None:
    positions = Positions().plus(2, failed=True).plus(0, failed=True).plus(1, failed=False)
    assert positions == Positions((3, 1, 1), (2, 1, 0))


def test_a_drafter_that_nobody_tried_is_like_the_others() -> None:
    known = table()
    learn(known, "a", drafts(0.8, 1000))
    learn(known, "b", drafts(0.4, 1000))
    assert rate(known, "a") == pytest.approx(0.8, abs=0.01)
    assert rate(known, "c") == pytest.approx(0.6, abs=0.01)


def test_a_cluster_moves_from_the_drafters_mean_to_its_own() -> None:
    known = table(strength=20.0)
    learn(known, "a", drafts(0.3, 4000), 0)
    means = [rate(known, "a", 1)]
    for _ in range(6):
        learn(known, "a", drafts(0.9, 20), 1)
        means.append(rate(known, "a", 1))
    assert means[0] == pytest.approx(0.3, abs=0.02)
    assert means[1] == pytest.approx(0.6, abs=0.05)  # twenty drafts weigh as much as the prior
    assert means == sorted(means)
    assert means[-1] > 0.75
    assert rate(known, "a", 0) == pytest.approx(0.3, abs=0.02)


def test_context_lengths_are_told_apart() -> None:
    known = table()
    learn(known, "a", drafts(0.8, 500), 2, 100)
    learn(known, "a", drafts(0.2, 500), 2, 100_000)
    assert rate(known, "a", 2, 300) > 0.75
    assert rate(known, "a", 2, 50_000) < 0.25
    assert 0.4 < rate(known, "a", 2, 1000) < 0.6  # nothing seen there: the cluster's


def test_what_is_old_fades() -> None:
    known = table(memory=100.0)
    for _ in range(50):
        learn(known, "a", drafts(0.9, 20))
    for _ in range(20):
        learn(known, "a", drafts(0.1, 20))
    assert rate(known, "a") < 0.15


# ---- what is known of a prompt


def prompt(kind: int, length: int, random: np.random.Generator) -> list[int]:
    words = np.random.default_rng(kind).integers(0, 50_000, 12)
    return random.choice(words, length).tolist()


def test_features_are_few_and_bounded() -> None:
    random = np.random.default_rng(0)
    for length in (0, 1, 2, 500):
        features = prompt_features(prompt(0, length, random))
        assert len(features) == NUM_FEATURES
        assert all(0.0 <= value <= 2.0 for value in features)
    assert prompt_features([7, 8, 9, 10])[-2] == 0.0
    assert prompt_features([7, 8] * 50)[-2] > 1.8  # nearly every bigram stood there before


def test_like_prompts_share_a_cluster() -> None:
    random = np.random.default_rng(1)
    clusters = PromptClusters(4)
    kinds = [int(kind) for kind in random.integers(0, 4, 300)]
    found = [clusters.add(prompt_features(prompt(kind, 150, random))) for kind in kinds]
    late = list(zip(kinds, found, strict=True))[100:]
    purity = sum(max(sum(k == kind and c == cluster for k, c in late) for kind in range(4)) for cluster in range(4))
    assert purity / len(late) > 0.7
    assert clusters.add(()) is None


def test_clusters_outlive_their_process() -> None:
    random = np.random.default_rng(2)
    first, second = PromptClusters(3), PromptClusters(3)
    for kind in range(3):
        first.add(prompt_features(prompt(kind, 100, random)))
    second.restore(first.snapshot())
    assert second.snapshot() == first.snapshot()
    some = prompt_features(prompt(1, 100, random))
    assert first.add(some) == second.add(some)
    for damaged in (
        {"centers": [[1.0]], "counts": [1]},
        {"centers": [], "counts": [1]},
        {"centers": [], "counts": [], "x": 1},
    ):
        with pytest.raises(ValueError, match=r".+"):
            second.restore(damaged)
