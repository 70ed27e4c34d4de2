"""Which requests `hedge` lets explore, and which drafter."""

import numpy as np

from cluster.config import HedgePolicy
from router.assignment import RequestView
from router.estimates.request_acceptance import RequestAcceptance
from router.prompt_features import PromptClusters

CONFIG = HedgePolicy(exploration=0.01, request_rounds=8)
NUM_REQUESTS = 5000


def explorers(num_rounds: list[float], num_drafts: list[float]) -> list[int]:
    """Drafters that NUM_REQUESTS requests explore."""
    requests = RequestAcceptance(np.random.default_rng(0))
    views = [RequestView(f"r{i}", 100, 120, (), ()) for i in range(NUM_REQUESTS)]
    rows = requests.follow(views, PromptClusters(1))
    known = np.tile(np.array(num_rounds), (NUM_REQUESTS, 1))
    return requests.draw_explorers(rows, known, np.array(num_drafts), CONFIG)[1].tolist()


def test_of_drafters_that_a_request_has_not_seen_the_least_known_is_tried() -> None:
    assert set(explorers([8.0, 8.0, 300.0], [500.0, 100.0, 0.0])) == {1}


def test_more_requests_explore_while_little_is_known() -> None:
    unknown, known = len(explorers([8.0, 300.0], [0.0, 1e4])), len(explorers([8.0, 300.0], [1e4, 1e4]))
    assert 0.08 < unknown / NUM_REQUESTS < 0.12
    assert 0.006 < known / NUM_REQUESTS < 0.014
    assert not explorers([100.0, 300.0], [0.0, 0.0])
