"""Which drafters `hedge` lets requests try before they are known, and how often it explores afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from router.assignment import AssignmentPolicy, Observation, PoolMember, RequestView, ScoreCounts
from router.drafter.hedge import Hedge
from router.estimates.request_acceptance import RequestAcceptance
from tests.support.observations import right_at

SELDOM = 1e-9
NUM_REQUESTS = 5000
NUM_ROUNDS = 10  # of a slot
SCORED = PoolMember("scored", 64, 0.01)
UNSCORED = PoolMember("unscored", 64, 0.01, leads=False)


def explorers(num_rounds: list[float], num_drafts: list[float]) -> list[int]:
    """Drafters that NUM_REQUESTS requests explore."""
    requests = RequestAcceptance(np.random.default_rng(0))
    known = np.tile(np.array(num_rounds), (NUM_REQUESTS, 1))
    return requests.draw_explorers(np.ones(NUM_REQUESTS, np.bool_), known, np.array(num_drafts), 0.01)[1].tolist()


def test_of_drafters_that_a_request_has_not_seen_the_least_known_is_tried() -> None:
    assert set(explorers([8.0, 8.0, 300.0], [500.0, 100.0, 80.0])) == {1}


def test_a_small_share_explores_what_it_has_not_seen() -> None:
    assert 0.006 < len(explorers([8.0, 300.0], [1e4, 1e4])) / NUM_REQUESTS < 0.014
    assert not explorers([100.0, 300.0], [100.0, 100.0])


# ---- first drafts


def tokens(request_id: str, drafter: str, tokens_per_round: float) -> Observation:
    num_right = round(NUM_ROUNDS * (tokens_per_round - 1.0))
    positions = right_at(NUM_ROUNDS, num_right)
    return Observation(
        request_id, drafter, NUM_ROUNDS, 8 * NUM_ROUNDS, num_right, NUM_ROUNDS + num_right, NUM_ROUNDS * 0.03, positions
    )


def late(request_id: str, drafter: str, tokens_per_round: float) -> Observation:
    return Observation(request_id, drafter, NUM_ROUNDS, 0, 0, NUM_ROUNDS, NUM_ROUNDS * 0.03, num_missed=NUM_ROUNDS)


def served(
    pool: Sequence[PoolMember],
    lens: dict[str, float],
    num_requests: int = 1,
    num_slots: int = 60,
    exploration: float = SELDOM,
    unscored: Callable[[str, str, float], Observation] = tokens,
) -> list[list[str]]:
    """Drafters of the requests by slot. Drafters that lead are scored. ``lens``: tokens of a round."""
    policy: AssignmentPolicy = Hedge(exploration=exploration)
    requests = [RequestView(f"r{i}", 50, 100, ()) for i in range(num_requests)]
    history = []
    for _ in range(num_slots):
        chains = policy.assign(requests, pool)
        requests = [replace(r, chain=chains[r.request_id]) for r in requests]
        history.append([r.chain[0] for r in requests])
        leads = {member.name: member.leads for member in pool}
        observations = [
            (tokens if leads[r.chain[0]] else unscored)(r.request_id, r.chain[0], lens[r.chain[0]]) for r in requests
        ]
        scores = [
            ScoreCounts(r.request_id, name, right_at(NUM_ROUNDS, round(NUM_ROUNDS * (lens[name] - 1.0))))
            for r in requests
            for name, is_scored in leads.items()
            if is_scored and name != r.chain[0]
        ]
        policy.observe(observations, scores)
    return history


def slots_with(history: list[list[str]], drafter: str) -> int:
    """Slots of requests."""
    return sum(row.count(drafter) for row in history)


def test_what_is_not_scored_is_tried_at_once_and_left_for_good_if_it_is_worse() -> None:
    history = served([SCORED, UNSCORED], {"scored": 2.0, "unscored": 1.4})
    num_tried = slots_with(history, "unscored")
    assert 2 <= num_tried <= 10
    assert slots_with(history[-10:], "unscored") == 0


def test_what_is_better_is_kept() -> None:
    history = served([SCORED, UNSCORED], {"scored": 2.0, "unscored": 2.6})
    assert slots_with(history, "unscored") >= 57


def test_the_worse_it_does_the_sooner_it_is_left() -> None:
    num = [slots_with(served([SCORED, UNSCORED], {"scored": 2.0, "unscored": one}), "unscored") for one in (1.0, 1.4, 1.8)]
    assert num == sorted(num)
    assert num[0] < num[-1]


def test_what_cannot_be_worth_it_is_not_tried() -> None:
    """All three tokens of a draft right, in rounds that take three times as long."""
    dear = replace(UNSCORED, max_draft_len=3, cost=1.0)
    lens = {"scored": 2.0, "unscored": 4.0}
    assert slots_with(served([SCORED, dear], lens), "unscored") == 0
    assert slots_with(served([SCORED, replace(dear, cost=0.1)], lens), "unscored") > 50


def test_without_exploration_nothing_is_tried() -> None:
    history = served([SCORED, UNSCORED], {"scored": 2.0, "unscored": 1.4}, exploration=0.0)
    assert slots_with(history[1:], "unscored") == 0


def test_few_of_many_requests_make_first_drafts() -> None:
    history = served([SCORED, UNSCORED], {"scored": 2.0, "unscored": 1.4}, num_requests=40)
    assert max(row.count("unscored") for row in history[1:]) <= 8
    assert slots_with(history, "unscored") <= 24


def test_a_drafter_whose_drafts_do_not_come_is_not_tried_for_long() -> None:
    history = served([SCORED, UNSCORED], {"scored": 2.0, "unscored": 5.0}, unscored=late)
    assert slots_with(history, "unscored") <= 20
