"""State in files: damage, killed writers, folders that cannot be written."""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.config import StateConfig
from cluster.state import Document, FileStateStore, StateUnavailable, open_store, state_fault

NAMESPACE = "test"


def test_namespaces_do_not_meet(tmp_path: Path) -> None:
    config = StateConfig(folder=tmp_path)
    open_store(config, "one").put("k", 1)
    assert open_store(config, "two").get("k") is None


@pytest.mark.parametrize("damage", [b"", b'{"version": 1, "val', b"[1]", b'{"version": "1", "value": 2}', b"\xff\xfe"])
def test_a_damaged_file_is_set_aside_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    store = FileStateStore(tmp_path)
    store.put("a/b", 1)
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert store.get("a/b") is None
    assert "state 'a/b' starts empty" in caplog.text
    assert path.with_name(path.name + ".corrupt").read_bytes() == damage
    assert store.keys() == ()
    assert store.put("a/b", 2, expected_version=0) == 1


KILLED_WRITER = """
import sys
from pathlib import Path
from cluster.state import FileStateStore
store = FileStateStore(Path(sys.argv[1]))
print("ready", flush=True)
for i in range(10**9):
    store.put("k", [i] * 2000)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_a_whole_document(tmp_path: Path) -> None:
    for attempt in range(3):
        writer = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        reader = FileStateStore(tmp_path)
        before = reader.get("k")
        seen = before.version if before is not None else 0
        deadline_s = time.monotonic() + 30
        while (reached := reader.get("k")) is None or reached.version < seen + 3 + attempt:
            assert time.monotonic() < deadline_s
        writer.kill()
        writer.wait(10)
        writer.stdout.close()
        left = FileStateStore(tmp_path).get("k")
        assert left is not None
        assert left.version >= reached.version
        assert isinstance(left.value, list)
        assert len(left.value) == 2000
        assert len(set(map(str, left.value))) == 1
        FileStateStore(tmp_path).put("another", 1)
        assert [path.name for path in tmp_path.glob(".new-*")] == []
        assert list(tmp_path.glob("*.corrupt")) == []


@pytest.mark.parametrize("folder", ["/proc/outrider", "{}/file/x"])  # nobody can write there, root included
def test_a_folder_that_cannot_be_written_is_named_when_it_is_written(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    store = FileStateStore(Path(folder.format(tmp_path)))
    with pytest.raises(StateUnavailable, match=r"state in .* cannot be changed: "):
        store.put("k", 1)
    assert "cannot be changed" in str(state_fault(store))


def test_a_store_is_read_while_somebody_holds_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.state.LOCK_DEADLINE_S", 0.01)
    FileStateStore(tmp_path).put("k", 1)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = FileStateStore(tmp_path)
        assert store.get("k") == Document(1, 1)
        with pytest.raises(StateUnavailable, match="somebody else has held"):
            store.put("k", 2)
        assert "somebody else has held" in str(state_fault(store))
    assert store.put("k", 2) == 2
    assert (state_fault(store), store.keys()) == (None, ("k",))


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = FileStateStore(tmp_path / "state")
    store.put("k", 1)
    shutil.rmtree(tmp_path / "state")
    assert store.get("k") is None
    assert store.put("k", 2) == 1


def test_documents_are_readable_by_people_and_by_nobody_else(tmp_path: Path) -> None:
    FileStateStore(tmp_path / "new").put("router", {"a": 1})
    assert json.loads((tmp_path / "new" / "router.json").read_text()) == {"version": 1, "value": {"a": 1}}
    assert os.stat(tmp_path / "new").st_mode & 0o077 == 0
