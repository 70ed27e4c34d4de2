"""What SPIN's algorithm does line by line, and what full information does that a bandit cannot."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from cluster.config import PolicyConfig
from router.assignment import (
    TARGET_ONLY,
    AssignmentPolicy,
    Chain,
    MemberCosts,
    Observation,
    PoolMember,
    Positions,
    RequestView,
    ScoreCounts,
)
from router.drafter.seats import FreeCapacity
from router.estimates.acceptance import AcceptanceModel, OnTimeRates
from router.papers.not_a_bandit import Hedge
from router.papers.spin import Lbss
from tests.support.observations import right_at

TEN_RIGHT = Positions((10, 9, 8, 7), (9, 8, 7, 6))
TEN_WRONG = Positions((10,), (0,))


def pool_of(*capacities: int) -> list[PoolMember]:
    return [PoolMember(f"d{i}", capacity, 0.1) for i, capacity in enumerate(capacities)]


def views(num: int) -> list[RequestView]:
    return [RequestView(f"r{i}", 10, 10, ()) for i in range(num)]


def seen(request_id: str, drafter: str, tokens_per_round: float, rounds: int = 10) -> Observation:
    num_tokens = round(tokens_per_round * rounds)
    positions = right_at(rounds, num_tokens - rounds)
    return Observation(request_id, drafter, rounds, 7 * rounds, 0, num_tokens, rounds * 0.1, positions)


def step(policy: AssignmentPolicy, requests: list[RequestView], pool: list[PoolMember]) -> list[RequestView]:
    chains = policy.assign(requests, pool)
    return [replace(request, chain=chains[request.request_id]) for request in requests]


def chains_of(requests: list[RequestView]) -> dict[str, Chain]:
    return {request.request_id: request.chain for request in requests}


# ---- lbss


def test_stages_follow_each_other_as_in_algorithm_1() -> None:
    """alpha slots of draws, one for each chunk of beta, then 2^k slots of one choice."""
    policy = Lbss(exploration_slots=6, chunk_slots=2)
    requests, pool = views(30), pool_of(30, 30, 30)
    history = []
    for _ in range(3 * 6 + 2 + 4 + 8 + 1):
        requests = step(policy, requests, pool)
        history.append(chains_of(requests))
        policy.observe(
            [seen(r.request_id, r.chain[0], 1.0 + int(r.chain[0][1:]) + int(r.request_id[1:]) % 3) for r in requests]
        )
    changes = [slot for slot in range(1, len(history)) if history[slot] != history[slot - 1]]
    # The chunks of each epoch, and its exploitation of 2, 4 and 8 slots.
    assert changes == [*(2, 4, 6), *(8, 10, 12, 14), *(18, 20, 22, 24), 32]


def test_exploration_draws_uniformly_and_drops_what_is_too_much() -> None:
    policy = Lbss(exploration_slots=400, chunk_slots=1)
    requests, pool = views(30), pool_of(4, 30, 30)
    counts: Counter[Chain] = Counter()
    num_dropped: Counter[str] = Counter()
    for _ in range(400):
        requests = step(policy, requests, pool)
        counts.update(request.chain for request in requests)
        num_dropped.update(request.request_id for request in requests if request.chain == TARGET_ONLY)
    total = 400 * 30
    assert counts["d1",] / total == pytest.approx(1 / 3, abs=0.02)
    assert counts["d2",] / total == pytest.approx(1 / 3, abs=0.02)
    assert counts["d0",] / total == pytest.approx(4 / 30, abs=0.01)  # nearly always full
    assert counts[TARGET_ONLY] / total == pytest.approx(1 / 3 - 4 / 30, abs=0.02)
    # Drawn from those that are too many (line 9): each as often, 80 times of 400, with a standard deviation of 8.
    assert all(40 < num_dropped[request.request_id] < 120 for request in requests)


@pytest.mark.parametrize("num_dropped", [1, 2])
def test_a_dropped_request_is_drawn_again_with_the_next_chunk_only(num_dropped: int) -> None:
    policy, pool = Lbss(exploration_slots=4, chunk_slots=2), pool_of(1)
    dropped = [request for request in step(policy, views(1 + num_dropped), pool) if request.chain == TARGET_ONLY]
    assert len(dropped) == num_dropped
    assert {request.chain for request in step(policy, dropped, pool)} == {TARGET_ONLY}  # a place is free
    assert sorted(request.chain for request in step(policy, dropped, pool)) == [TARGET_ONLY] * (num_dropped - 1) + [("d0",)]


def test_exploitation_is_the_best_matching_of_the_means() -> None:
    """Two places that both requests want: the sum decides, not who comes first."""
    policy = Lbss(exploration_slots=2, chunk_slots=1)
    requests, pool = views(2), pool_of(1, 2)
    for _ in range(2):
        step(policy, requests, pool)
        policy.observe([seen("r0", "d0", 3.0), seen("r0", "d1", 2.5), seen("r1", "d0", 2.9), seen("r1", "d1", 1.0)])
    assert chains_of(step(policy, requests, pool)) == {"r0": ("d1",), "r1": ("d0",)}


def test_only_exploration_teaches() -> None:
    policy = Lbss(exploration_slots=2, chunk_slots=1)
    requests, pool = views(1), pool_of(1, 1)
    for _ in range(2):
        requests = step(policy, requests, pool)
    policy.observe([seen("r0", "d0", 2.0), seen("r0", "d1", 1.0)])
    requests = step(policy, requests, pool)
    kept = policy.snapshot()
    policy.observe([seen("r0", "d1", 9.0, rounds=1000)])
    assert policy.snapshot() == kept
    assert chains_of(step(policy, requests, pool)) == {"r0": ("d0",)}


def test_who_comes_during_exploitation_takes_the_best_that_is_free() -> None:
    policy = Lbss(exploration_slots=2, chunk_slots=1)
    requests, pool = views(1), pool_of(1, 1, 1)
    for _ in range(2):
        requests = step(policy, requests, pool)
    policy.observe([seen("r0", "d0", 3.0), seen("r0", "d1", 1.0), seen("r0", "d2", 2.0)])
    requests = step(policy, requests, pool)
    assert chains_of(step(policy, [*requests, RequestView("new", 5, 5, ())], pool)) == {"r0": ("d0",), "new": ("d2",)}


def test_chunks_fill_an_exploration() -> None:
    with pytest.raises(ValidationError, match="must be a multiple of chunk_slots"):
        PolicyConfig(kind="lbss", exploration_slots=5, chunk_slots=2)


# ---- hedge


def taught(policy: AssignmentPolicy, num_slots: int = 10) -> AssignmentPolicy:
    """With scores alone for d1, which nobody was ever with, and would be right."""
    requests, pool = [replace(r, chain=("d0",)) for r in views(8)], pool_of(8, 8)
    policy.assign(requests, pool)
    for _ in range(num_slots):
        policy.observe(
            [seen(r.request_id, "d0", 1.2) for r in requests], [ScoreCounts(r.request_id, "d1", TEN_RIGHT) for r in requests]
        )
    return policy


def test_scores_alone_move_requests_to_a_drafter_that_never_drafted() -> None:
    policy = taught(Hedge())
    requests = [replace(request, chain=("d0",)) for request in views(8)]
    assert set(policy.assign(requests, pool_of(8, 8)).values()) == {("d1",)}
    assert policy.assign([RequestView("new", 5, 5, ())], pool_of(8, 8)) == {"new": ("d1",)}


def test_a_tenth_of_a_token_decides_for_new_requests() -> None:
    """The noise is there for requests that no estimate tells apart."""

    def share(policy: Hedge) -> float:
        for _ in range(3):
            for name, num_tokens in (("d0", 1.8), ("d1", 1.9)):
                policy.observe([seen(f"{name}{i}", name, num_tokens) for i in range(50)])
        chains = policy.assign([RequestView(f"r{i}", 10, 10, ()) for i in range(100)], pool_of(100, 100))
        return Counter(chains.values())["d1",] / len(chains)

    assert share(Hedge()) > 0.95
    assert share(Hedge(learning_rate=1.0)) < 0.8


def test_how_long_rounds_take_counts_as_much_as_what_they_bring() -> None:
    policy = Hedge(learning_rate=100)
    slow = Observation("a", "d0", 100, 700, 100, 200, 30.0, Positions((100, 90), (90, 10)))
    fast = Observation("b", "d1", 100, 700, 80, 180, 10.0, Positions((100, 75), (75, 5)))
    for _ in range(3):  # one slot might be chance
        policy.observe([slow, fast])
    assert policy.assign([RequestView("r", 5, 5, ())], pool_of(4, 4)) == {"r": ("d1",)}


def test_a_drafter_that_is_late_is_left_for_its_lateness_and_is_thought_no_less_right() -> None:
    """Where it would be right is known from scores, and where nothing came nothing was wrong."""
    policy = Hedge(learning_rate=100)
    requests = [replace(request, chain=("d0",)) for request in views(8)]
    pool = [replace(member, cost=0.01) for member in pool_of(8, 8)]
    policy.assign(requests, pool)

    def slot(late: bool, num_slots: int) -> set[Chain]:
        for _ in range(num_slots):
            here = [
                Observation(r.request_id, "d0", 10, 0, 0, 10, 1.0, num_missed=10) if late else seen(r.request_id, "d0", 4.0)
                for r in requests
            ]
            policy.observe(here, [ScoreCounts(r.request_id, "d1", right_at(10, 8)) for r in requests])
        return set(policy.assign(requests, pool).values())

    assert slot(late=False, num_slots=5) == {("d0",)}  # four tokens a round for less than two
    assert slot(late=True, num_slots=30) == {("d1",)}
    assert slot(late=False, num_slots=10) == {("d0",)}  # at once, for nothing is to be unlearned


def test_lateness_is_forgotten_while_others_draft_so_that_it_is_tried_again() -> None:
    in_time = OnTimeRates(memory=100.0)
    assert in_time.shares(["d0", "d1"]).tolist() == [1.0, 1.0]
    for _ in range(20):
        in_time.observe([Observation("r", "d0/1", 10, 0, 0, 10, 1.0, num_missed=10), seen("q", "d1", 2.0)])
    late, punctual = in_time.shares(["d0", "d1"]).tolist()
    assert late < 0.1
    assert punctual == 1.0
    shares = []
    for _ in range(800):
        in_time.observe([seen("q", "d1", 2.0)])
        shares.append(in_time.shares(["d0"]).item())
    assert shares == sorted(shares)
    assert shares[40] < 0.15  # by and by
    assert shares[-1] > 0.9


def test_only_late_drafts_are_no_wrong_ones() -> None:
    policy = Hedge()
    policy.observe([Observation(f"r{i}", "d0", 10, 0, 0, 10, 1.0, num_missed=10) for i in range(9)])
    known = policy.snapshot()
    assert isinstance(known, dict)
    assert known["acceptance"] == {}  # nothing was drafted, so nothing is known of what drafts are worth
    policy.observe([seen("r", "d0", 3.0)])
    once = policy.snapshot()
    policy.observe([Observation("r", "d0", 10, 0, 0, 10, 1.0, num_missed=10)])
    again = policy.snapshot()
    assert isinstance(once, dict)
    assert isinstance(again, dict)
    assert once["acceptance"] == again["acceptance"]
    assert once["rounds"] != again["rounds"]  # but how long its rounds take is learned of these, too


def test_scarce_places_go_to_the_greatest_sum() -> None:
    policy = Hedge(learning_rate=1000, hysteresis=0.0)
    requests, pool = views(6), pool_of(6, 2)
    policy.assign(requests, pool)
    for _ in range(20):
        policy.observe([], [ScoreCounts(r.request_id, "d0", TEN_WRONG) for r in requests])
        policy.observe([], [ScoreCounts(f"r{i}", "d1", Positions((10,), (2 * i,))) for i in range(5)])
    chains = policy.assign(requests, pool)
    assert [request_id for request_id, chain in chains.items() if chain == ("d1",)] == ["r3", "r4"]


def test_hysteresis_and_the_cost_of_a_switch_hold_back_what_does_not_pay() -> None:

    def moves(costs: MemberCosts | None, committed_len: int = 1000, **changed: float) -> bool:
        policy = Hedge(learning_rate=1000, **{"payback_s": 1.0} | changed)
        pool = [replace(member, costs=costs) for member in pool_of(4, 4)]
        request = RequestView("r", 10, committed_len, ("d0",))
        policy.assign([request], pool)
        for _ in range(50):
            policy.observe(
                [], [ScoreCounts("r", "d0", Positions((20,), (10,))), ScoreCounts("r", "d1", Positions((20,), (14,)))]
            )
        return policy.assign([request], pool) == {"r": ("d1",)}

    dear = MemberCosts(draft_s=((1, 0.01),), catch_up_s=0.0003, switch_s=0.01)
    assert moves(None)  # 1.70 tokens a round for 1.50
    assert not moves(None, hysteresis=0.25)
    assert not moves(dear)  # 0.3 s of catching up within the second in which it must pay
    assert moves(dear, committed_len=10)
    assert moves(dear, payback_s=10.0)


def test_values_are_the_formula_worked_by_hand() -> None:
    """v = (1 + s (L - 1) + G / (eta n)) / T, less catching up over the payback time, more where a request stays."""
    policy, model = Hedge(learning_rate=4.0, hysteresis=0.25, payback_s=2.0), AcceptanceModel()
    first = MemberCosts(draft_s=((1, 0.01),), catch_up_s=0.0, switch_s=0.2)
    second = MemberCosts(draft_s=((1, 0.01),), catch_up_s=0.01, switch_s=0.0)
    pool = [replace(one, costs=costs) for one, costs in zip(pool_of(9, 9, 9), (first, second, None), strict=True)]
    requests = [RequestView("stays", 5, 40, ("d0",)), RequestView("left", 5, 500, ()), RequestView("next", 0, 0, ())]
    ids = [request.request_id for request in requests]
    observations = [
        Observation("stays", "d0", 10, 70, 20, 30, 1.0, right_at(8, 20), num_missed=2),
        Observation("left", "d1", 10, 70, 5, 15, 4.0, right_at(10, 5)),
    ]
    policy.assign(requests, pool)
    policy.observe(observations)
    model.next_slot(ids)
    model.observe(observations, [])
    on_time = np.array([(8 + 8) / (10 + 8), 1.0, 1.0])
    lens, num_rounds = model.expected_lens(ids, pool)
    noise = np.random.default_rng(0).gumbel(size=6).reshape(2, 3)
    tokens = 1 + on_time * (lens - 1) + np.vstack([noise, np.zeros(3)]) / (4.0 * num_rounds)
    tokens[0] *= 1.25, 1 - 0.01 * 40 / 2.0, 1  # stays with d0
    tokens[1] *= 1 - 0.2 / 2.0, 0, 1  # 5 s of catching up are more than the 2 in which they must pay
    tokens[2] *= 1 - 0.2 / 2.0, 1, 1
    # Rounds of 0.1 and 0.4 s; for one without any the mean of all, and 8 draft tokens of 0.1 steps.
    round_s = np.array([0.1, 0.4, (1.0 + 4.0) / 20 * (1 + 0.1 * 8)])
    values = tokens / round_s
    expected = np.maximum(values - 10.0, 1e-6 * (values + 10.0))
    assert policy.values(requests, pool, FreeCapacity(pool)) == pytest.approx(expected, rel=1e-9)
    assert expected.min() < 1e-4 < expected.max(), "places that gain nothing among others"


def test_before_any_round_a_place_is_worth_what_a_cheap_draft_is() -> None:
    """Half of the tokens right, rounds of a second and of what 8 draft tokens cost more."""
    pool = [replace(one, cost=cost) for one, cost in zip(pool_of(1, 1), (0.0, 0.05), strict=True)]
    found = Hedge().values([RequestView("next", 0, 0, ())], pool, FreeCapacity(pool))
    half = sum(0.5**k for k in range(9))
    assert found.tolist() == [pytest.approx([half - 1.0, half / 1.4 - 1.0])]


def test_hedge_without_requests_or_drafters_and_with_requests_to_come() -> None:
    policy, to_come = taught(Hedge()), RequestView("next", 0, 0, ())
    assert policy.assign([], pool_of(8, 8)) == {}
    assert policy.assign(views(1), []) == {"r0": TARGET_ONLY}
    assert policy.assign([to_come], pool_of(8, 8)) == {"next": ("d1",)}
    pool = [replace(pool_of(1)[0], lookups=("d1",)), pool_of(8, 8)[1]]
    assert policy.assign([*views(1), to_come, replace(to_come, request_id="later")], pool)["r0"] == ("d0",), "d0 asks d1"


@pytest.mark.slow
def test_lbss_explores_at_once_after_an_idle_hour() -> None:
    """Slots in which nobody is served are no part of an epoch."""
    policy = Lbss(exploration_slots=4, chunk_slots=2)
    pool = [PoolMember("d0", 8, 0.1), PoolMember("d1", 8, 0.1)]
    to_come = RequestView("next", 0, 0, ())
    for _ in range(36_000):
        policy.assign([to_come], pool)
    policy.assign([RequestView("r", 10, 20, ()), to_come], pool)
    policy.observe([seen("r", "d0", 2.0)])  # which only exploration learns from
    snapshot = policy.snapshot()
    assert isinstance(snapshot, dict)
    assert snapshot["epoch"] == 1
    assert snapshot["drafters"] == {"d0": [10, 20, 1.0]}
