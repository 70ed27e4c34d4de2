"""What a router learned is saved, and recalled by its successor."""

import fcntl
import threading
from pathlib import Path

import pytest
from pydantic import JsonValue

from actors.router import SAVE_PERIOD_S, RouterMemory
from cluster.config import Config, ModelConfig, PolicyConfig, RouterConfig
from cluster.state import Document, FileStateStore, StateUnavailable
from router.assignment import AssignmentPolicy, Observation
from router.drafter.epsilon_greedy import EpsilonGreedy
from router.drafter.seats import Fixed
from tests.support.memory_store import MemoryStateStore
from tests.unit.test_router import EPSILON_GREEDY, POOL, view


def learned() -> AssignmentPolicy:
    policy = EpsilonGreedy(epsilon=0.0)
    policy.observe([Observation("x", "a", 20, 80, 5, 25, 1.0), Observation("y", "b", 20, 80, 60, 80, 1.0)])
    return policy


def test_a_router_that_starts_over_knows_what_the_last_one_learned() -> None:
    store = MemoryStateStore()
    memory = RouterMemory(store, Config())
    memory.recall(learned())
    memory.save(learned(), 0.0)
    assert store.keys() == ()  # nothing was learned yet worth an fsync
    memory.save(learned(), SAVE_PERIOD_S)
    memory.settle()
    fresh = EpsilonGreedy(epsilon=0.0)
    RouterMemory(store, Config()).recall(fresh)
    assert fresh.assign([view("new")], POOL) == {"new": ("b",)}
    assert EpsilonGreedy(epsilon=0.0).assign([view("new")], POOL) == {"new": ("a",)}


def test_it_is_saved_once_a_period() -> None:
    store = MemoryStateStore()
    memory = RouterMemory(store, Config())
    policy = learned()
    memory.recall(policy)
    for i in range(40):
        policy.observe([Observation("x", "a", 20, 80, 5, 25, 1.0)])
        memory.save(policy, i * SAVE_PERIOD_S / 10)
        memory.settle()
    (key,) = store.keys()
    document = store.get(key)
    assert document is not None
    assert document.version == 3
    for i in range(40, 100):  # nothing new to save
        memory.save(policy, i * SAVE_PERIOD_S / 10)
        memory.settle()
    again = store.get(key)
    assert again is not None
    assert again.version == 4  # what came after the third


def test_other_models_and_policies_are_not_mixed_up() -> None:
    store = MemoryStateStore()
    for config in (
        Config(router=EPSILON_GREEDY),
        Config(router=EPSILON_GREEDY, model=ModelConfig(name="/models/other")),
        Config(router=RouterConfig(policy=PolicyConfig(kind="epsilon-greedy", epsilon=0.5))),
        Config(router=RouterConfig(policy=PolicyConfig(kind="fixed"))),
    ):
        memory = RouterMemory(store, config)
        memory.recall(learned())
        for now_s in (0.0, SAVE_PERIOD_S):
            memory.save(learned(), now_s)
            memory.settle()
    assert len(store.keys()) == 3  # the third shares what the first learned


class Back(MemoryStateStore):
    """Away at first, or slow."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = True
        self.answers = threading.Event()
        self.answers.set()

    def get(self, key: str) -> Document | None:
        self._answer()
        return super().get(key)

    def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
        self._answer()
        return super().put(key, value, expected_version)

    def _answer(self) -> None:
        assert self.answers.wait(30.0)
        if self.is_away:
            raise StateUnavailable("nobody answers")


def test_a_store_that_is_away_stops_nobody_and_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    store = Back()
    memory = RouterMemory(store, Config())
    policy = learned()
    memory.recall(policy)
    for i in range(3):
        memory.save(policy, i * SAVE_PERIOD_S)
        memory.settle()
    assert memory.fault == "the state store cannot be used, what is learned is not kept: nobody answers"
    assert [record.message for record in caplog.records] == [f"{memory.fault}; it is tried again every 10 s"]
    store.is_away = False
    for i in range(3, 7):
        memory.save(policy, i * SAVE_PERIOD_S)
        memory.settle()
    assert memory.fault is None
    assert len(store.keys()) == 1


def test_a_store_that_can_only_be_read_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.state.LOCK_DEADLINE_S", 0.01)
    store = FileStateStore(tmp_path)
    store.put("before", 1)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory = RouterMemory(store, Config())
        memory.recall(Fixed())
        memory.settle()
        assert "somebody else has held" in str(memory.fault)
        memory.save(Fixed(), 0.0)
        memory.save(Fixed(), SAVE_PERIOD_S)
    memory.save(Fixed(), 2 * SAVE_PERIOD_S)
    memory.settle()
    memory.save(Fixed(), 3 * SAVE_PERIOD_S)
    memory.settle()
    assert memory.fault is None


def test_what_was_learned_is_recalled_late_and_not_lost_meanwhile() -> None:
    store = Back()
    store.is_away = False
    before = RouterMemory(store, Config())
    before.recall(learned())
    before.save(learned(), 0.0)
    before.save(learned(), SAVE_PERIOD_S)
    before.close()
    store.is_away = True
    after, policy = RouterMemory(store, Config()), EpsilonGreedy(epsilon=0.0)
    after.recall(policy)
    after.save(policy, 0.0)
    store.is_away = False
    for i in range(1, 5):
        after.save(policy, i * SAVE_PERIOD_S)
        after.settle()
    assert policy.snapshot() == learned().snapshot()


def test_a_store_that_hangs_holds_no_slot_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's thread is the one whose slots are watched."""
    monkeypatch.setattr("actors.router.RECALL_S", 0.01)
    store = Back()
    store.is_away = False
    store.answers.clear()
    memory, policy = RouterMemory(store, Config()), learned()
    memory.recall(policy)
    for i in range(4):
        memory.save(policy, i * SAVE_PERIOD_S)  # returns, though the store does not
    assert memory.fault is not None
    store.answers.set()
    memory.settle()
    for i in range(4, 8):
        memory.save(policy, i * SAVE_PERIOD_S)
        memory.settle()
    assert (memory.fault, len(store.keys())) == (None, 1)


@pytest.mark.parametrize(
    "stored", [None, [], {"a": 1}, {"a": [1, 2]}, {"a": [1, 2, 0]}, {"a": [1, 2, "x"]}, {"a": [-1, 1, 1]}]
)
def test_what_is_no_snapshot_is_refused_and_changes_nothing(stored: JsonValue, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStateStore()
    memory = RouterMemory(store, Config())
    memory.recall(learned())
    memory.save(learned(), 0.0)
    memory.save(learned(), SAVE_PERIOD_S)
    memory.settle()
    (key,) = store.keys()
    store.put(key, stored)
    policy = EpsilonGreedy(epsilon=0.0)
    before = policy.snapshot()
    RouterMemory(store, Config()).recall(policy)
    assert "it starts anew" in caplog.text
    assert policy.snapshot() == before
