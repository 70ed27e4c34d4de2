"""Acceptance estimates: how they shrink, fade, and know what they do not know."""

import numpy as np
import pytest

from router.assignment import Positions
from router.estimates.acceptance import NUM_POSITIONS, AcceptanceTable, Lesson, Rates
from router.prompt_features import NUM_FEATURES, PromptClusters, prompt_features


def table(strength: float = 20.0, memory: float = 1e6) -> AcceptanceTable:
    return AcceptanceTable(num_clusters=4, strength=strength, memory=memory)


def drafts(rate: float, num: int) -> Positions:
    """``num`` drafts of any length, of which each token is right at ``rate``."""
    at = np.arange(NUM_POSITIONS)
    return Positions(tuple(round(num * rate**i) for i in at), tuple(round(num * rate ** (i + 1)) for i in at))


def test_positions_count_what_was_reached_and_what_was_right() -> None:
    positions = Positions().plus(2, failed=True).plus(0, failed=True).plus(1, failed=False)
    assert positions == Positions((3, 1, 1), (2, 1, 0))


def test_a_drafter_that_nobody_tried_is_like_the_others_and_uncertain() -> None:
    known = table()
    known.observe([Lesson("a", drafts(0.8, 1000)), Lesson("b", drafts(0.4, 1000))])
    assert known.rates("a").mean[0] == pytest.approx(0.8, abs=0.01)
    assert known.rates("c").mean[0] == pytest.approx(0.6, abs=0.01)
    assert known.rates("c").std[0] > 10 * known.rates("a").std[0]
    assert known.num_reached("c") == 0.0


def test_a_cluster_moves_from_the_drafters_mean_to_its_own() -> None:
    known = table(strength=20.0)
    known.observe([Lesson("a", drafts(0.3, 4000), cluster=0)])
    means = [known.rates("a", 1).mean[0]]
    for _ in range(6):
        known.observe([Lesson("a", drafts(0.9, 20), cluster=1)])
        means.append(known.rates("a", 1).mean[0])
    assert means[0] == pytest.approx(0.3, abs=0.02)
    assert means[1] == pytest.approx(0.6, abs=0.05)  # twenty drafts weigh as much as the prior
    assert means == sorted(means)
    assert means[-1] > 0.75
    assert known.rates("a", 0).mean[0] == pytest.approx(0.3, abs=0.02)


def test_context_lengths_are_told_apart() -> None:
    known = table()
    known.observe([Lesson("a", drafts(0.8, 500), 2, 100), Lesson("a", drafts(0.2, 500), 2, 100_000)])
    assert known.rates("a", 2, 300).mean[0] > 0.75
    assert known.rates("a", 2, 50_000).mean[0] < 0.25
    assert 0.4 < known.rates("a", 2, 1000).mean[0] < 0.6  # nothing seen there: the cluster's


def test_uncertainty_falls_with_what_was_seen() -> None:
    known = table()
    stds = []
    for _ in range(4):
        known.observe([Lesson("a", drafts(0.6, 400), 0, 100)])
        stds.append(known.rates("a", 0, 100).std[0])
    assert stds == sorted(stds, reverse=True)
    assert stds[-1] == pytest.approx(np.sqrt(0.6 * 0.4 / 1603), rel=0.05)  # of a Beta posterior with 1,600 drafts


def test_what_is_old_fades() -> None:
    known = table(memory=100.0)
    for _ in range(50):
        known.observe([Lesson("a", drafts(0.9, 20))])
    for _ in range(20):
        known.observe([Lesson("a", drafts(0.1, 20))])
    assert known.rates("a").mean[0] < 0.15
    assert known.num_reached("a") < 150


def test_the_expected_length_is_that_of_the_rates() -> None:
    rates = Rates(np.full(NUM_POSITIONS, 0.5), np.full(NUM_POSITIONS, 0.01))
    assert rates.expected_len(0) == (1.0, 0.0)
    assert rates.expected_len(3)[0] == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert rates.expected_len(200)[0] == pytest.approx(2.0)  # positions behind the last share its rate


def test_the_uncertainty_of_a_length_is_that_of_drawn_rates() -> None:
    random = np.random.default_rng(0)
    mean, std = np.linspace(0.8, 0.5, NUM_POSITIONS), np.full(NUM_POSITIONS, 0.02)
    drawn = random.normal(mean, std, (20_000, NUM_POSITIONS))
    for draft_len in (1, 5, 12):
        at = np.minimum(np.arange(draft_len), NUM_POSITIONS - 1)
        lens = 1.0 + np.cumprod(drawn[:, at], axis=1).sum(axis=1)
        expected, spread = Rates(mean, std).expected_len(draft_len)
        assert expected == pytest.approx(lens.mean(), rel=0.005)
        assert spread == pytest.approx(lens.std(), rel=0.05)


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
