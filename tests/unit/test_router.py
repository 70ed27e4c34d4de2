"""The router's slot: reports of targets in, a table out."""

import pytest
from pydantic import JsonValue

from actors.router import Router
from actors.router_memory import SAVE_PERIOD_S, RouterMemory
from actors.target import SlotReport
from cluster.config import Config, EpsilonGreedyPolicy, FixedPolicy, ModelConfig, RouterConfig
from cluster.state import Document, MemoryStateStore, StateUnavailable
from cluster.types import RoutingTable
from router.assignment import AssignmentPolicy, Observation, PoolMember, RequestView
from router.policies import build_policy

EPSILON_GREEDY = RouterConfig(policy=EpsilonGreedyPolicy())
POOL = (PoolMember("a", 8, 0.1), PoolMember("b", 8, 0.2))


def report(
    *requests: RequestView, version: int = 0, drafters: tuple[str, ...] = ("a", "b"), seen: tuple[Observation, ...] = ()
) -> SlotReport:
    return SlotReport(requests, seen, version, drafters)


def view(request_id: str, *chain: str) -> RequestView:
    return RequestView(request_id, 5, 5, chain)


def test_no_target_no_table() -> None:
    assert Router(build_policy(FixedPolicy()), POOL, 4).slot([]) is None


def test_a_table_is_published_once_and_again_to_whoever_missed_it() -> None:
    router = Router(build_policy(FixedPolicy()), POOL, 4)
    table = router.slot([report(view("r"))])
    assert table == RoutingTable(1, {"r": ("a",)}, (("a",),), 4)
    assert router.slot([report(view("r", "a"), version=1)]) is None
    again = router.slot([report(view("r", "a"), version=1), report(version=0)])
    assert again is not None
    assert (again.version, again.chains) == (2, table.chains)


def test_a_drafter_that_one_target_lost_or_that_drains_gets_nobody() -> None:
    router = Router(build_policy(FixedPolicy()), POOL, 4)
    table = router.slot([report(view("r", "a")), report(drafters=("b",))])
    assert table is not None
    assert table.chains == {"r": ("b",)}
    assert table.defaults == (("b",),)
    router.set_draining(frozenset({"b"}))
    table = router.slot([report(view("r", "b")), report(drafters=("b",))])
    assert table is not None
    assert table.chains == {"r": ()}


def test_a_router_that_starts_over_is_heard() -> None:
    table = Router(build_policy(FixedPolicy()), POOL, 4).slot([report(view("r"), version=41)])
    assert table is not None
    assert table.version == 42


def test_what_targets_saw_decides_also_for_requests_to_come() -> None:
    router = Router(build_policy(EpsilonGreedyPolicy(epsilon=0.0)), POOL, 4)
    seen = tuple(
        Observation(f"{drafter}{i}", drafter, 20, 80, accepted, 20 + accepted, 1.0)
        for drafter, accepted in (("a", 5), ("b", 60))
        for i in range(5)
    )
    table = router.slot([report(view("r", "a"), seen=seen)])
    assert table is not None
    assert table.chains == {"r": ("b",)}
    assert table.defaults == (("b",),)


# ---- what survives a router


class Away(MemoryStateStore):
    """A store whose server is gone."""

    def get(self, key: str) -> Document | None:
        raise StateUnavailable("nobody answers")

    def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
        raise StateUnavailable("nobody answers")


def learned() -> AssignmentPolicy:
    policy = build_policy(EpsilonGreedyPolicy(epsilon=0.0))
    policy.observe([Observation("x", "a", 20, 80, 5, 25, 1.0), Observation("y", "b", 20, 80, 60, 80, 1.0)])
    return policy


def test_a_router_that_starts_over_knows_what_the_last_one_learned() -> None:
    store = MemoryStateStore()
    memory = RouterMemory(store, Config())
    memory.save(learned(), 0.0)
    assert store.keys() == ()  # nothing was learned yet worth an fsync
    memory.save(learned(), SAVE_PERIOD_S)
    fresh = build_policy(EpsilonGreedyPolicy(epsilon=0.0))
    RouterMemory(store, Config()).recall(fresh)
    assert fresh.assign([view("new")], POOL) == {"new": ("b",)}
    assert build_policy(EpsilonGreedyPolicy(epsilon=0.0)).assign([view("new")], POOL) == {"new": ("a",)}


def test_it_is_saved_once_a_period() -> None:
    store = MemoryStateStore()
    memory = RouterMemory(store, Config())
    policy = learned()
    for i in range(40):
        policy.observe([Observation("x", "a", 20, 80, 5, 25, 1.0)])
        memory.save(policy, i * SAVE_PERIOD_S / 10)
    (key,) = store.keys()
    document = store.get(key)
    assert document is not None
    assert document.version == 3
    for i in range(40, 100):  # nothing new to save
        memory.save(policy, i * SAVE_PERIOD_S / 10)
    again = store.get(key)
    assert again is not None
    assert again.version == 4  # what came after the third


def test_other_models_and_policies_are_not_mixed_up() -> None:
    store = MemoryStateStore()
    for config in (
        Config(router=EPSILON_GREEDY),
        Config(router=EPSILON_GREEDY, model=ModelConfig(name="/models/other")),
        Config(router=RouterConfig(policy=EpsilonGreedyPolicy(epsilon=0.5))),
        Config(router=RouterConfig(policy=FixedPolicy())),
    ):
        memory = RouterMemory(store, config)
        for now_s in (0.0, SAVE_PERIOD_S):
            memory.save(learned(), now_s)
    assert len(store.keys()) == 3  # the third shares what the first learned


def test_a_store_that_is_away_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    memory = RouterMemory(Away(), Config())
    policy = learned()
    memory.recall(policy)
    for i in range(3):
        memory.save(policy, i * SAVE_PERIOD_S)
    assert [record.message for record in caplog.records] == [
        "the router starts without what it learned before: nobody answers",
        *["what the router learned was not saved: nobody answers"] * 2,
    ]


@pytest.mark.parametrize(
    "stored", [None, [], {"a": 1}, {"a": [1, 2]}, {"a": [1, 2, 0]}, {"a": [1, 2, "x"]}, {"a": [-1, 1, 1]}]
)
def test_what_is_no_snapshot_is_refused_and_changes_nothing(stored: JsonValue, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStateStore()
    memory = RouterMemory(store, Config())
    memory.save(learned(), 0.0)
    memory.save(learned(), SAVE_PERIOD_S)
    (key,) = store.keys()
    store.put(key, stored)
    policy = learned()
    memory.recall(policy)
    assert "it starts anew" in caplog.text
    assert policy.snapshot() == learned().snapshot()
