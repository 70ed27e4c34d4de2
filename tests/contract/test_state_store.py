"""One contract for every state store, and what Redis promises beyond it."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.commands.core import Script

from benchmarks.redis_server import RedisServer
from cluster.config import StateConfig
from cluster.errors import InvalidField
from cluster.state import MAX_DOCUMENT_BYTES, MAX_KEY_LEN, Document, StateConflict, StateStore, StateUnavailable, open_store
from cluster.state_redis import RedisStateStore
from tests.support.memory_store import MemoryStateStore

NAMESPACE = "test"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


Opener = Callable[[], StateStore]


@pytest.fixture(params=["memory", "file", pytest.param("redis", marks=pytest.mark.redis)])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens one and the same store, again and again."""
    opened: list[StateStore] = []
    memory = MemoryStateStore()
    server: RedisServer | None = request.getfixturevalue("redis_server") if request.param == "redis" else None

    def open_one() -> StateStore:
        if request.param == "memory":
            return memory
        config = server.config if server is not None else StateConfig(folder=tmp_path / "state")
        opened.append(open_store(config, NAMESPACE))
        return opened[-1]

    yield open_one
    store = open_one()
    left = store.keys()
    for key in left:
        store.delete(key)
    for one in opened:
        one.close()
        one.close()


@pytest.fixture
def store(opener: Opener) -> StateStore:
    return opener()


VALUES = [None, True, 0, -1.5, "", "naïve \U0001f680 \x00", [], {}, {"a": [1, {"b": None}], "ä/": 2**60}, [[1.0, 2.5]] * 50]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_what_is_put_is_got_also_by_others(opener: Opener, value: object) -> None:
    assert opener().put("profile/m=1/cpu_0.x", value) == 1
    assert opener().get("profile/m=1/cpu_0.x") == Document(value, 1)


def test_an_unknown_key(store: StateStore) -> None:
    assert store.get("nothing") is None
    store.delete("nothing")
    assert store.keys() == ()


def test_a_value_is_a_copy(store: StateStore) -> None:
    value: dict[str, object] = {"a": [1]}
    store.put("k", value)
    value["a"] = 2
    first = store.get("k")
    assert first is not None
    assert first.value == {"a": [1]}
    assert isinstance(first.value, dict)
    first.value["a"] = 3
    assert store.get("k") == Document({"a": [1]}, 1)


def test_versions_count_writes_and_guard_them(store: StateStore) -> None:
    assert store.put("k", "a", expected_version=0) == 1
    assert store.put("k", "b") == 2
    assert store.put("k", "c", expected_version=2) == 3
    for stale in (0, 2, 4):
        with pytest.raises(StateConflict, match=f"has version 3, expected was {stale}"):
            store.put("k", "x", expected_version=stale)
    assert store.get("k") == Document("c", 3)
    with pytest.raises(StateConflict, match="has version 0, expected was 1"):
        store.put("new", "x", expected_version=1)
    assert store.get("new") is None


def test_a_deleted_document_is_gone_and_can_come_again(store: StateStore) -> None:
    store.put("k", 1)
    store.delete("k")
    assert store.get("k") is None
    assert store.put("k", 2, expected_version=0) == 1


def test_keys_are_listed_by_prefix(store: StateStore) -> None:
    names = ["profile/a", "profile/b", "router", "profile=2", "profile.json", "x/.y"]
    for name in names:
        store.put(name, name)
    assert store.keys() == tuple(sorted(names))
    assert store.keys("profile/") == ("profile/a", "profile/b")
    assert store.keys("profile*") == ()


@pytest.mark.parametrize("key", ["", "/a", "..", ".lock", "a b", "a\n", "ä", "a%2Fb", "x" * (MAX_KEY_LEN + 1)])
def test_a_key_that_cannot_be_stored_is_refused(store: StateStore, key: str) -> None:
    for call in (store.get, store.delete, lambda key: store.put(key, 1)):
        with pytest.raises(InvalidField, match="key: must have"):
            call(key)


def test_the_longest_key_can_be_stored(store: StateStore) -> None:
    key = "a" + "/" * (MAX_KEY_LEN - 1)
    store.put(key, 1)
    assert store.keys() == (key,)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, "x" * MAX_DOCUMENT_BYTES], ids=["nan", "set", "huge"])
def test_a_value_that_cannot_be_stored_is_refused(store: StateStore, value: object) -> None:
    with pytest.raises(InvalidField, match="k: must"):
        store.put("k", value)
    assert store.get("k") is None


def test_no_update_is_lost_between_threads(opener: Opener) -> None:
    def count() -> None:
        store = opener()
        for _ in range(20):
            while True:
                known = store.get("counter")
                try:
                    value = known.value if known is not None else 0
                    store.put("counter", value + 1, expected_version=known.version if known is not None else 0)
                    break
                except (StateConflict, StateUnavailable):  # unavailable: a loaded machine held the lock for its deadline
                    continue

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert opener().get("counter") == Document(80, 80)


@pytest.mark.redis
@pytest.mark.parametrize(
    "fields",
    [
        {"version": "1", "value": "no JSON"},
        {"version": "one", "value": "1"},
        {"version": "1"},
        {"value": "1"},
        {"version": "1", "value": b"\xff"},
    ],
    ids=str,
)
def test_a_damaged_hash_counts_as_absent_with_a_warning(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, fields: dict[str, str | bytes]
) -> None:
    store = open_store(redis_server.config, NAMESPACE)
    with redis.Redis(port=redis_server.port) as client:
        client.hset(f"{NAMESPACE}:state:damaged", mapping=fields)
    assert store.get("damaged") is None
    assert "state 'damaged' counts as absent" in caplog.text
    assert store.put("damaged", 2) >= 1
    found = store.get("damaged")
    assert found is not None
    assert found.value == 2
    store.delete("damaged")
    store.close()


@pytest.fixture
def fragile_redis(tmp_path: Path, redis_server: RedisServer) -> Iterator[RedisServer]:
    """One to be stopped and killed."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.mark.redis
def test_redis_comes_back_and_the_store_with_it(fragile_redis: RedisServer) -> None:
    store = open_store(fragile_redis.config, NAMESPACE, deadline_s=1.5)
    store.put("k", 1)
    fragile_redis.stop()
    with pytest.raises(StateUnavailable, match=r"Redis at redis://127.0.0.1:\d+/0 did not answer in 1.5 s"):
        store.get("k")
    fragile_redis.start()
    assert store.get("k") == Document(1, 1)
    store.close()


@pytest.mark.redis
def test_a_call_outlasts_a_short_absence(fragile_redis: RedisServer) -> None:
    store = open_store(fragile_redis.config, NAMESPACE, deadline_s=30.0)
    store.put("k", 1)
    fragile_redis.stop()
    back = threading.Thread(target=fragile_redis.start)
    back.start()
    assert store.put("k", 2, expected_version=1) == 2
    back.join(30)
    store.close()


@pytest.mark.redis
def test_a_redis_that_hangs_is_given_up_and_found_again(fragile_redis: RedisServer) -> None:
    store = open_store(fragile_redis.config, NAMESPACE, deadline_s=1.0)
    store.put("k", 1)
    fragile_redis.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StateUnavailable, match="did not answer in"):
            store.put("k", 2)
    finally:
        fragile_redis.signal(signal.SIGCONT)
    patient = open_store(fragile_redis.config, NAMESPACE, deadline_s=5.0)
    assert patient.get("k") is not None
    assert store.put("k", 3) >= 2
    store.close()
    patient.close()


@pytest.mark.redis
def test_a_retry_of_a_write_that_was_carried_out_is_no_conflict(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStateStore(redis_server.config, NAMESPACE, 2.0)
    store.put("retried", "old")
    call, lost = Script.__call__, []

    def answer_gets_lost(self: Script, *arguments: object, **named: object) -> object:
        answer = call(self, *arguments, **named)
        if not lost:
            lost.append(answer)
            raise redis.ConnectionError("cut off")
        return answer

    monkeypatch.setattr(Script, "__call__", answer_gets_lost)
    assert store.put("retried", "new", expected_version=1) == 2
    assert len(lost) == 1
    assert store.get("retried") == Document("new", 2)
    store.delete("retried")
    store.close()


@pytest.mark.redis
def test_a_password_comes_from_its_file(fragile_redis: RedisServer, tmp_path: Path) -> None:
    fragile_redis.require_password("right")
    (tmp_path / "secret").write_text("right\n")
    config = fragile_redis.config.model_copy(update={"password_file": tmp_path / "secret"})
    store = open_store(config, NAMESPACE)
    assert store.put("k", 1) == 1
    store.close()
    (tmp_path / "secret").write_text("wrong\n")
    store = open_store(config, NAMESPACE)
    with pytest.raises(StateUnavailable, match=r"Redis at redis://127.0.0.1:\d+/0 refused: ") as caught:
        store.get("k")
    assert "wrong " not in str(caught.value)
    store.close()
    store = open_store(config.model_copy(update={"password_file": tmp_path / "missing"}), NAMESPACE)
    with pytest.raises(StateUnavailable, match=r"password_file: .*missing cannot be read"):
        store.get("k")
    (tmp_path / "missing").write_text("right\n")
    assert store.get("k") == Document(1, 1)
