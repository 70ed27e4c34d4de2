"""Assignment policies: what each of them learns. What all promise is in `tests/contract/test_assignment.py`."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from cluster.config import CascadeOptions, Config, DrafterConfig, ModelOptions, NgramOptions, PolicyConfig
from cluster.types import RoutingTable
from router.assignment import (
    TARGET_ONLY,
    AssignmentPolicy,
    Observation,
    PoolMember,
    Positions,
    RequestView,
    ScoreCounts,
    drafter_of,
)
from router.drafter.epsilon_greedy import EpsilonGreedy, GoodputEstimates
from router.drafter.policies import POLICIES, build_policy, build_pool
from router.drafter.router import MAX_CHAINS, next_table
from router.drafter.seats import Fixed
from router.estimates.acceptance import AcceptanceModel
from router.estimates.decayed import GENERATION_SLOTS, ExpiringCache
from router.papers.spin import GreedyLength


def view(request_id: str, chain: tuple[str, ...] = (), prompt_len: int = 10) -> RequestView:
    return RequestView(request_id, prompt_len, prompt_len, chain)


def seen(request_id: str, drafter: str, tokens_per_round: float, rounds: int = 10, round_s: float = 0.1) -> Observation:
    return Observation(request_id, drafter, rounds, 7 * rounds, 0, round(tokens_per_round * rounds), rounds * round_s)


def pool_of(*capacities: int) -> list[PoolMember]:
    return [PoolMember(f"d{i}", capacity, cost=0.1 * (i + 1)) for i, capacity in enumerate(capacities)]


def advance(requests: list[RequestView], chains: dict[str, tuple[str, ...]]) -> list[RequestView]:
    return [replace(request, chain=chains[request.request_id]) for request in requests]


# ---- fixed


def test_fixed_fills_in_the_order_of_the_pool() -> None:
    chains = Fixed().assign([view(f"r{i}") for i in range(6)], pool_of(2, 3))
    assert list(chains.values()) == [("d0",)] * 2 + [("d1",)] * 3 + [TARGET_ONLY]


def test_a_fixed_chain_is_all_or_nothing() -> None:
    policy = Fixed(("d0", "d1"))
    requests = [view(f"r{i}") for i in range(3)]
    assert list(policy.assign(requests, pool_of(3, 2)).values()) == [("d0", "d1"), ("d0", "d1"), TARGET_ONLY]
    assert set(policy.assign(requests, pool_of(3)).values()) == {TARGET_ONLY}
    assert set(Fixed(()).assign(requests, pool_of(3)).values()) == {TARGET_ONLY}


def test_a_fixed_chain_takes_a_place_at_its_last_drafter_alone() -> None:
    """Who rides ahead does so in that drafter's process, under its configured name."""
    pool = [PoolMember("d0", 1, 0.1), PoolMember("d0/1", 1, 0.1), PoolMember("d1", 3, 0.2), PoolMember("d1/1", 1, 0.2)]
    requests = [view("stays", ("d0", "d1/1")), *(view(f"r{i}") for i in range(4))]
    chains = Fixed(("d0", "d1")).assign(requests, pool)
    assert list(chains.values()) == [("d0", "d1/1"), *[("d0", "d1")] * 3, TARGET_ONLY]
    closed = [replace(one, draining=one.name.startswith("d0")) for one in pool]
    assert set(Fixed(("d0", "d1")).assign(requests, closed).values()) == {TARGET_ONLY}


def test_a_fixed_chain_stays_at_its_replica() -> None:
    pool = [PoolMember("d0", 1, 0.1), PoolMember("d0/1", 9, 0.1)]
    requests = [view("a", ("d0",)), view("b", ("d0/1",))]
    assert Fixed(("d0",)).assign(requests, pool) == {"a": ("d0",), "b": ("d0/1",)}


# ---- greedy-length


def test_shorter_prompts_take_smaller_drafters() -> None:
    pool = [PoolMember("large", 30, 0.3), PoolMember("small", 30, 0.1), PoolMember("middle", 30, 0.2)]
    requests = [view(f"r{i}", prompt_len=1 + (i * 37) % 90) for i in range(90)]
    chains = GreedyLength().assign(requests, pool)
    for request in requests:
        assert chains[request.request_id] == (("small", "middle", "large")[(request.prompt_len - 1) // 30],)


def test_a_wide_drafter_takes_a_wide_range_of_lengths() -> None:
    requests = [view(f"r{i}", prompt_len=1 + i) for i in range(40)]
    chains = GreedyLength().assign(requests, pool_of(300, 100))
    assert Counter(chains.values()) == {("d0",): 30, ("d1",): 10}


def test_a_full_drafter_passes_requests_on_to_its_neighbour() -> None:
    requests = [view(f"r{i}", prompt_len=1) for i in range(5)]  # all short, so all point at d0
    assert Counter(GreedyLength().assign(requests, pool_of(2, 2, 8)).values()) == {("d0",): 2, ("d1",): 2, ("d2",): 1}


def test_a_lone_prompt_is_short_or_long_by_what_came_before() -> None:
    policy, pool = GreedyLength(), pool_of(100, 100)
    policy.assign([view(f"r{i}", prompt_len=10 * i) for i in range(50)], pool)
    assert policy.assign([view("short", prompt_len=5)], pool) == {"short": ("d0",)}
    assert policy.assign([view("long", ("d0",), prompt_len=480)], pool) == {"long": ("d1",)}


def test_a_placed_request_stays_and_requests_to_come_are_no_prompts() -> None:
    policy, pool = GreedyLength(), pool_of(100, 100)
    policy.assign([RequestView(f"next{i}", 0, 0, ()) for i in range(9)], pool)
    assert policy.assign([view("a")], pool) == {"a": ("d0",)}, "the shortest prompt so far"
    shorter = [view(f"r{i}", prompt_len=1 + i) for i in range(9)]
    assert policy.assign([view("a", ("d0",)), *shorter], pool)["a"] == ("d0",)
    assert policy.assign([view("a")], pool) == {"a": ("d1",)}, "it has lost its place, and is the longest"


# ---- epsilon-greedy


def live(
    policy: AssignmentPolicy, pool: list[PoolMember], goodput: dict[str, dict[str, float]], slots: int, seed: int = 0
) -> Counter[str]:
    """Runs slots on a pool in which request kind k ("k-...") commits goodput[k][drafter] tokens a round, noisily.

    Returns how often requests sat where they do best, over the last half of the slots."""
    random = Random(seed)
    requests = [view(f"{kind}-{i}") for i in range(20) for kind in goodput]
    hits: Counter[str] = Counter()
    for slot in range(slots):
        requests = advance(requests, dict(policy.assign(requests, pool)))
        observations = []
        for request in requests:
            kind = request.request_id[0]
            drafter = request.chain[0]
            if slot >= slots // 2:
                hits[kind] += goodput[kind][drafter] == max(goodput[kind].values())
            rate = max(1.0, random.gauss(goodput[kind][drafter], 0.5))
            observations.append(seen(request.request_id, drafter, rate))
        policy.observe(observations)
    total = 20 * (slots - slots // 2)
    return Counter({kind: round(100 * hits[kind] / total) for kind in goodput})


def test_epsilon_greedy_finds_what_suits_each_half_of_the_requests() -> None:
    goodput = {"x": {"d0": 3.0, "d1": 1.5}, "y": {"d0": 1.5, "d1": 3.0}}
    policy = EpsilonGreedy(epsilon=0.1)
    hits = live(policy, pool_of(64, 64), goodput, slots=120)
    assert hits["x"] >= 85
    assert hits["y"] >= 85


def test_a_policy_that_does_not_learn_fails_that_test() -> None:
    goodput = {"x": {"d0": 3.0, "d1": 1.5}, "y": {"d0": 1.5, "d1": 3.0}}
    for config in (PolicyConfig(kind="fixed"), PolicyConfig(kind="epsilon-greedy", epsilon=1.0)):
        hits = live(build_policy(config), pool_of(64, 64), goodput, slots=120)
        assert min(hits.values()) < 70


def test_scarce_places_go_to_those_who_gain_most() -> None:
    policy = EpsilonGreedy(epsilon=0.0, hysteresis=0.0, prior_rounds=0.1)
    requests = [view(f"r{i}") for i in range(6)]
    policy.assign(requests, pool_of(6, 6))
    policy.observe([seen(f"r{i}", "d0", 1.0) for i in range(6)])
    policy.observe([seen(f"r{i}", "d1", 1.0 + i) for i in range(6)])
    chains = policy.assign([replace(request, chain=("d0",)) for request in requests], pool_of(6, 2))
    assert [request_id for request_id, chain in chains.items() if chain == ("d1",)] == ["r5", "r4"]


def test_hysteresis_holds_back_small_gains_and_lets_large_ones_pass() -> None:
    for gain, moves in ((1.05, False), (1.5, True)):
        policy = EpsilonGreedy(epsilon=0.0, hysteresis=0.2)
        policy.assign([view("r")], pool_of(4, 4))
        policy.observe([seen("r", "d0", 2.0, rounds=100), seen("r", "d1", 2.0 * gain, rounds=100)])
        assert (policy.assign([view("r", ("d0",))], pool_of(4, 4))["r"] == ("d1",)) is moves


def test_a_newcomer_is_not_held_by_the_default_it_was_given() -> None:
    policy = EpsilonGreedy(epsilon=0.0, hysteresis=1.0)
    policy.observe([seen("gone", "d0", 2.0), seen("gone", "d1", 2.2)])
    assert policy.assign([view("new", ("d0",))], pool_of(4, 4)) == {"new": ("d1",)}


def test_exploration_is_as_frequent_as_asked() -> None:
    policy = EpsilonGreedy(epsilon=0.25, seed=7)
    policy.observe([seen("gone", "d0", 3.0, rounds=1000), seen("gone", "d1", 1.0, rounds=1000)])
    chains = policy.assign([view(f"r{i}") for i in range(4000)], pool_of(4000, 4000))
    explored = sum(chain == ("d1",) for chain in chains.values()) / 4000
    assert explored == pytest.approx(0.125, abs=0.02)  # half of those who explore draw the best all the same


def test_seeds_differ() -> None:
    requests = [view(f"r{i}") for i in range(100)]
    first, second = (EpsilonGreedy(epsilon=1.0, seed=seed).assign(requests, pool_of(100, 100)) for seed in (1, 2))
    assert first != second


def test_an_estimate_moves_from_the_pool_to_the_request() -> None:
    estimates = GoodputEstimates(prior_rounds=8, memory_rounds=1e6)
    estimates.observe([seen(f"other{i}", "d0", 2.0, rounds=1000) for i in range(10)])
    values = []
    for _ in range(6):
        pool = estimates.of_pool(["d0", "d1"])
        values.append(estimates.of_request("r", pool)["d0"])
        estimates.observe([seen("r", "d0/1", 4.0, rounds=8)])
    assert values[0] == pytest.approx(20.0)  # tokens a second: two a round of 0.1 s
    assert values[1] == pytest.approx(30.0, rel=0.01)  # eight rounds of its own weigh as much as the prior
    assert values == sorted(values)
    assert values[-1] > 36.0
    assert pool["d1"] == pool["d0"]  # never tried: the mean of what was


def test_an_estimate_follows_a_drafter_that_gets_worse() -> None:
    estimates = GoodputEstimates(prior_rounds=8, memory_rounds=100)
    estimates.observe([seen("r", "d0", 4.0, rounds=10) for _ in range(100)])
    estimates.observe([seen("r", "d0", 1.0, rounds=10) for _ in range(30)])
    assert estimates.of_pool(["d0"])["d0"] < 12.0


def test_what_nobody_asks_for_is_forgotten() -> None:
    memory: ExpiringCache[int] = ExpiringCache()
    memory.put("kept", 1)
    memory.put("gone", 2)
    for _ in range(2 * GENERATION_SLOTS):
        memory.next_slot()
        assert memory.get("kept") == 1
    assert memory.get("gone") is None
    assert len(memory) == 1


# ---- the registry and the table


def test_every_configured_policy_is_registered() -> None:
    kinds = get_args(PolicyConfig.model_fields["kind"].annotation)
    assert set(kinds) == set(POLICIES)
    for kind in kinds:
        build_policy(PolicyConfig(kind=kind))


def test_the_pool_has_a_member_per_replica_and_orders_by_size() -> None:
    model = ModelOptions(model="x")
    config = Config(
        drafters=(
            DrafterConfig(name="cascade", options=CascadeOptions(members=(NgramOptions(), model))),
            DrafterConfig(name="model", options=model, replicas=2, capacity=7),
            DrafterConfig(name="ngram", options=NgramOptions()),
        )
    )
    pool = build_pool(config)
    assert [(member.name, member.capacity) for member in pool] == [
        ("cascade", 64),
        ("model", 7),
        ("model/1", 7),
        ("ngram", 64),
    ]
    by_cost = sorted(pool, key=lambda member: member.cost)
    assert [drafter_of(member.name) for member in by_cost] == ["ngram", "cascade", "model", "model"]
    assert [member.lookups for member in pool] == [("ngram",), (), (), ()]


def test_a_table_changes_its_version_only_when_it_must() -> None:
    requests = [view("a", ("d0",)), view("b")]
    assert next_table(RoutingTable(0), [], {}, [()], [0]).version == 1  # what was never published is
    first = next_table(RoutingTable(0), requests, {"a": ("d1",), "b": ()}, [("d0",)], [0, 0])
    assert first == RoutingTable(1, {"a": ("d1",), "b": ()}, (("d0",),))
    assert next_table(first, requests, {"a": ("d1",), "b": ()}, [("d0",)], [1, 1]) is first
    assert next_table(first, requests, {"a": ("d1",), "b": ()}, [("d0",)], [1, 0]).version == 2  # one has not heard it
    assert next_table(first, requests[:1], {"a": ("d1",), "b": ()}, [("d0",)], [1]) == RoutingTable(
        2, {"a": ("d1",)}, (("d0",),)
    )
    assert next_table(first, [], {}, [], [41]) == RoutingTable(42, {}, ((),))  # a restarted router overtakes


def test_a_table_is_bounded_and_drops_those_who_stay_first() -> None:
    requests = [view(f"r{i}", ("d0",)) for i in range(MAX_CHAINS + 10)]
    chains = {request.request_id: ("d0",) for request in requests} | {f"r{MAX_CHAINS + 9}": ("d1",)}
    table = next_table(RoutingTable(0), requests, chains, [()], [0])
    assert len(table.chains) == MAX_CHAINS
    assert table.chains[f"r{MAX_CHAINS + 9}"] == ("d1",)


# ---- acceptance over all requests and of each: shrinkage and forgetting


DRAFT_LEN = 4


def learn(known: AcceptanceModel, drafter: str, right: float, num: int, request: str = "gone") -> None:
    """``num`` drafts of which each token is right at rate ``right``."""
    reached = tuple(round(num * right**i) for i in range(DRAFT_LEN))
    positions = Positions(reached, tuple(round(num * right ** (i + 1)) for i in range(DRAFT_LEN)))
    known.observe([], [ScoreCounts(request, drafter, positions)])


def member(drafter: str) -> PoolMember:
    return PoolMember(drafter, 8, 0.1, max_draft_len=DRAFT_LEN)


def rate(known: AcceptanceModel, drafter: str) -> float:
    """At the first position."""
    return known.mean_rates(member(drafter))[0]


def test_positions_count_what_was_reached_and_what_was_right() -> None:
    positions = Positions().plus(2, failed=True).plus(0, failed=True).plus(1, failed=False)
    assert positions == Positions((3, 1, 1), (2, 1, 0))


def test_a_drafter_that_nobody_tried_is_like_the_others() -> None:
    known = AcceptanceModel()
    learn(known, "a", 0.8, 1000)
    learn(known, "b", 0.4, 1000)
    assert rate(known, "a") == pytest.approx(0.8, abs=0.01)
    assert rate(known, "c") == pytest.approx(0.6, abs=0.01)


def test_what_is_old_fades() -> None:
    known = AcceptanceModel()
    for _ in range(50):
        learn(known, "a", 0.9, 200)
    for _ in range(20):
        learn(known, "a", 0.1, 200)
    assert rate(known, "a") < 0.15


def test_a_request_moves_from_the_drafters_mean_to_its_own() -> None:
    known = AcceptanceModel()
    known.next_slot(["r"])
    learn(known, "a", 0.3, 4000)
    lens = []
    for num in (0, 8, 200):
        learn(known, "a", 0.9, num, "r")
        (own,), (num_rounds,) = known.expected_lens(["r"], [member("a")])
        lens.append((own.item(), num_rounds.item()))
    assert lens[0][0] == pytest.approx(1.0 + 0.3 + 0.3**2 + 0.3**3 + 0.3**4, abs=0.05)
    assert lens == sorted(lens)
    assert lens[-1][0] > 0.85 * (1.0 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4)


def test_of_requests_that_ended_nothing_is_kept_for_long() -> None:
    known = AcceptanceModel()
    known.next_slot(["r"])
    learn(known, "a", 0.9, 500, "r")
    for _ in range(3 * GENERATION_SLOTS):
        known.next_slot([])
    learn(known, "a", 0.1, 20_000)
    assert known.expected_lens(["r"], [member("a")])[0].item() < 1.2
