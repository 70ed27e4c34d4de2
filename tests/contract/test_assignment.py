"""What every assignment policy promises, whatever it learns."""

import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from cluster.config import PolicyConfig
from cluster.state import MAX_DOCUMENT_BYTES
from router.assignment import (
    TARGET_ONLY,
    Chain,
    MemberCosts,
    Observation,
    PoolMember,
    Positions,
    RequestView,
    ScoreCounts,
    drafter_of,
    member_name,
)
from router.drafter.policies import POLICIES, build_policy
from router.estimates.decayed import GENERATION_SLOTS
from tests.support.observations import right_at

CONFIGS: list[PolicyConfig] = [
    PolicyConfig(kind="fixed"),
    PolicyConfig(kind="fixed", chain=("d0",)),
    PolicyConfig(kind="fixed", chain=("d0", "d1")),
    PolicyConfig(kind="fixed", chain=()),
    PolicyConfig(kind="greedy-length"),
    PolicyConfig(kind="epsilon-greedy"),
    PolicyConfig(kind="epsilon-greedy", epsilon=1.0),
    PolicyConfig(kind="epsilon-greedy", epsilon=0.0),
    PolicyConfig(kind="lbss", exploration_slots=2, chunk_slots=1),
    PolicyConfig(kind="lbss", exploration_slots=4, chunk_slots=2),
    PolicyConfig(kind="hedge"),
    PolicyConfig(kind="chain"),
    PolicyConfig(kind="chain", max_levels=3),
]
LEARNERS: list[PolicyConfig] = [PolicyConfig(kind="epsilon-greedy"), PolicyConfig(kind="lbss"), PolicyConfig(kind="hedge")]
# Those that leave a request where it is as long as nothing is learned.
CALM: list[PolicyConfig] = [
    PolicyConfig(kind="fixed"),
    PolicyConfig(kind="greedy-length"),
    PolicyConfig(kind="epsilon-greedy", epsilon=0.0),
    PolicyConfig(kind="hedge"),
]

POOLS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7), st.integers(1, 3)), max_size=5)
SLOTS = st.lists(st.tuples(st.sets(st.integers(0, 12)), POOLS), min_size=1, max_size=5)


def test_every_policy_is_held_to_this() -> None:
    assert {config.kind for config in CONFIGS} == set(POLICIES)


def member(i: int, replica: int, capacity: int, trouble: int) -> PoolMember:
    """Of eight troubles six are none."""
    costs = MemberCosts(draft_s=((1, 0.001),), catch_up_s=1e-4, switch_s=0.01) if i % 2 else None
    return PoolMember(
        member_name(f"d{i}", replica),
        capacity,
        0.1 * i,
        healthy=(replica + trouble) % 8 != 1,
        draining=(replica + trouble) % 8 == 2,
        quarantined=trouble == 3,
        max_draft_len=4 + 4 * i,
        costs=costs,
    )


def observed(requests: list[RequestView], random: Random) -> list[Observation]:
    return [
        Observation(
            request.request_id,
            name,
            num_rounds := random.randint(0, 20),
            8 * num_rounds,
            num_accepted := random.randint(0, 4 * num_rounds),
            num_rounds + num_accepted,
            random.choice([0.0, 0.3]),
            random.choice([Positions(), random_positions(random)]),
        )
        for request in requests
        for name in request.chain
    ]


def scored(requests: list[RequestView], random: Random) -> list[ScoreCounts]:
    return [
        ScoreCounts(request.request_id, f"d{i}", random_positions(random))
        for request in requests
        for i in range(4)
        if random.random() < 0.5
    ]


def random_positions(random: Random) -> Positions:
    positions = Positions()
    for _ in range(random.randint(0, 5)):
        positions = positions.plus(random.randint(0, 12), random.random() < 0.9)
    return positions


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@given(slots=SLOTS, seed=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_capacity_openness_opt_out_and_completeness(
    config: PolicyConfig, slots: list[tuple[set[int], list[tuple[int, int, int]]]], seed: int
) -> None:
    """Whatever comes and goes: everybody gets a chain, of open members only, none of which is over its capacity."""
    policy, twin = build_policy(config), build_policy(config)
    random = Random(seed)
    chains: dict[str, Chain] = {}
    for numbers, shape in slots:
        pool = [
            member(i, replica, capacity, trouble)
            for i, (capacity, trouble, replicas) in enumerate(shape)
            for replica in range(replicas)
        ]
        requests = [
            RequestView(f"r{n}", random.randint(1, 99), 100, chains.get(f"r{n}", random.choice([(), ("d0",), ("gone",)])))
            for n in sorted(numbers)
        ]
        observations, scores = observed(requests, random), scored(requests, random)
        policy.observe(observations, scores)
        twin.observe(observations, scores)
        chains = dict(policy.assign(requests, pool))
        assert chains == twin.assign(requests, pool)  # same history, same decision
        assert set(chains) == {request.request_id for request in requests}
        load = Counter(chain[-1] for chain in chains.values() if chain)  # the others ride in its process
        room = {one.name: one.capacity for one in pool if one.healthy and not one.draining and not one.quarantined}
        assert {name for chain in chains.values() for name in chain[:-1]} <= {drafter_of(name) for name in room}
        assert all(load[name] <= room[name] for name in load)
        drops = config.kind in ("lbss", "chain")  # SPIN, algorithm 2, line 9; where nothing is faster
        if not drops and (config.kind != "fixed" or config.chain is None):
            assert sum(room.values()) == load.total() or TARGET_ONLY not in chains.values()


@pytest.mark.parametrize("config", CALM, ids=repr)
def test_nobody_moves_when_nothing_happens(config: PolicyConfig) -> None:
    policy = build_policy(config)
    pool = [PoolMember(f"d{i}", 3, 0.1 * (i + 1)) for i in range(3)]
    requests = [RequestView(f"r{i}", i + 1, 100, ()) for i in range(9)]
    first = dict(policy.assign(requests, pool))
    assert TARGET_ONLY not in first.values()
    requests = [replace(request, chain=first[request.request_id]) for request in requests]
    for _ in range(3 * GENERATION_SLOTS):
        assert policy.assign(requests, pool) == first


@pytest.mark.parametrize("trouble", ["healthy", "draining", "quarantined"])
@pytest.mark.parametrize("config", CALM, ids=repr)
def test_a_drafter_that_closes_loses_its_requests_and_only_these(config: PolicyConfig, trouble: str) -> None:
    policy = build_policy(config)
    pool = [PoolMember(f"d{i}", 8, 0.1 * (i + 1)) for i in range(3)]
    requests = [RequestView(f"r{i}", i + 1, 100, ()) for i in range(8)]
    before = policy.assign(requests, pool)
    requests = [replace(request, chain=before[request.request_id]) for request in requests]
    lost = requests[0].chain[0]
    closed = [replace(one, **{trouble: trouble != "healthy"}) if one.name == lost else one for one in pool]
    after = policy.assign(requests, closed)
    for request in requests:
        chain = after[request.request_id]
        assert chain
        assert chain != (lost,)
        assert chain == request.chain or request.chain == (lost,)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.kind != "fixed" or c.chain in (None, ("d0",))], ids=repr)
def test_replicas_share_the_load(config: PolicyConfig) -> None:
    pool = [PoolMember("d0", 10, 0.1), PoolMember("d0/1", 10, 0.1)]
    chains = build_policy(config).assign([RequestView(f"r{i}", 5, 5, ()) for i in range(10)], pool)
    assert Counter(chains.values()) == {("d0",): 5, ("d0/1",): 5}


@pytest.mark.parametrize("config", LEARNERS, ids=repr)
def test_another_ones_memory_can_be_taken_over_while_requests_live(config: PolicyConfig) -> None:
    policy, (snapshot, pool) = build_policy(config), learned(config, "d1", num_drafters=2)
    requests = [RequestView(f"r{i}", 5, 100, (f"d{i}",)) for i in range(3)]
    more = [*pool, PoolMember("d2", 8, 0.1)]
    policy.assign(requests, more)
    policy.observe([Observation(r.request_id, r.chain[0], 10, 70, 20, 30, 0.5, right_at(10, 20)) for r in requests])
    policy.restore(snapshot)
    assert set(policy.assign(requests, more)) == {"r0", "r1", "r2"}


def learned(config: PolicyConfig, best: str, num_drafters: int = 3) -> tuple[JsonValue, list[PoolMember]]:
    """What a policy keeps after all requests did well with one drafter only."""
    policy = build_policy(config)
    pool = [PoolMember(f"d{i}", 8, 0.1) for i in range(num_drafters)]
    requests = [RequestView(f"r{i}", 5, 100, (f"d{i}",)) for i in range(num_drafters)]
    policy.assign(requests, pool)
    for _ in range(30):
        num_right = [(r, 30 if r.chain[0] == best else 2) for r in requests]
        policy.observe(
            [Observation(r.request_id, r.chain[0], 10, 70, 0, 10 + n, 0.5, right_at(10, n)) for r, n in num_right]
        )
    return policy.snapshot(), pool


@pytest.mark.parametrize(
    "config",
    [PolicyConfig(kind="epsilon-greedy", epsilon=0.0), PolicyConfig(kind="lbss"), PolicyConfig(kind="hedge")],
    ids=repr,
)
def test_what_was_learned_outlives_the_policy(config: PolicyConfig) -> None:
    for best in ("d0", "d2"):
        snapshot, pool = learned(config, best)
        fresh = build_policy(config)
        fresh.restore(json.loads(json.dumps(snapshot)))
        assert json.loads(json.dumps(fresh.snapshot())) == json.loads(json.dumps(snapshot))
        request = RequestView("new", 5, 5, ())
        slots = 1 + config.parameters.get("exploration_slots", 0)
        for _ in range(slots):
            chains = fresh.assign([request], pool)
        assert chains == {"new": (best,)}


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_nothing_learned_is_nothing_to_keep(config: PolicyConfig) -> None:
    policy = build_policy(config)
    policy.assign([RequestView("r", 5, 5, ())], [PoolMember("d0", 8, 0.1)])
    assert not policy.snapshot()


@pytest.mark.parametrize("config", LEARNERS, ids=repr)
def test_what_is_kept_fits_the_store_however_large_the_pool(config: PolicyConfig) -> None:
    snapshot, _ = learned(config, "d0", num_drafters=64)
    assert len(json.dumps(snapshot)) < MAX_DOCUMENT_BYTES / 2


@pytest.mark.parametrize("config", LEARNERS, ids=repr)
@pytest.mark.parametrize("damage", [None, [], 3, {"d0": 1}, {"d0": [1, 2]}, {"d0": [1, 2, 0]}, {"d0": [-1, 1, 1]}])
def test_what_is_no_snapshot_is_refused_and_changes_nothing(config: PolicyConfig, damage: JsonValue) -> None:
    snapshot, _ = learned(config, "d0")
    policy = build_policy(config)
    policy.restore(snapshot)
    for bad in (
        damage,
        {**snapshot, "epoch": 0, "drafters": damage, "in_time": damage} if isinstance(snapshot, dict) else 0,
    ):
        with pytest.raises(ValueError, match=r".+"):
            policy.restore(bad)
        assert policy.snapshot() == snapshot


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_requests_to_come_take_no_place_from_live_ones(config: PolicyConfig) -> None:
    """As many places as requests, and a placeholder beside them: what the requests get is what they get without it."""
    pool = [member(0, 0, 8, 0), member(1, 0, 0, 3)]
    live = [RequestView(f"r{i}", 20 + i, 30 + i, ()) for i in range(8)]
    with_placeholder, without = build_policy(config), build_policy(config)
    for slot in range(12):
        placed = with_placeholder.assign([*live, RequestView("next", 0, 0, ())], pool)
        alone = without.assign(live, pool)
        num_seated = sum(bool(placed[request.request_id]) for request in live)
        if config.kind != "epsilon-greedy" and slot:
            assert num_seated == sum(map(bool, alone.values()))
        if num_seated == 8:
            assert placed["next"] == TARGET_ONLY
        live = [replace(r, chain=placed[r.request_id], committed_len=r.committed_len + 5) for r in live]
    if config.kind in ("lbss", "hedge", "greedy-length", "epsilon-greedy"):
        assert num_seated == 8
