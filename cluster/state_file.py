"""State in the files of a folder: a document is whole or absent, also after a power failure."""

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote

from pydantic import JsonValue

from cluster.state import Document, StateUnavailable, check_key, encode, next_version

logger = logging.getLogger(__name__)

SUFFIX = ".json"
LOCK_DEADLINE_S = 1.0
LOCK_POLL_S = 0.005  # a write holds the lock for about one fsync


class FileStateStore:
    """One file per key, replaced by renaming. A lock file orders writers; reads need no lock and no write access.

    A damaged file is renamed and counts as absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_written = False

    def get(self, key: str) -> Document | None:
        check_key(key)
        try:
            return self._read(key)
        except _Corrupt:
            with self._locked():
                return self._read_or_set_aside(key)

    def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
        check_key(key)
        text = encode(key, value)
        with self._locked():
            known = self._read_or_set_aside(key)
            version = next_version(key, known.version if known else 0, expected_version)
            self._write(key, f'{{"version":{version},"value":{text}}}')
        return version

    def delete(self, key: str) -> None:
        check_key(key)
        with self._locked():
            self._path(key).unlink(missing_ok=True)
            self._sync_folder()

    def keys(self, prefix: str = "") -> tuple[str, ...]:
        names = (path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"[!.]*{SUFFIX}"))
        return tuple(sorted(key for key in map(unquote, names) if key.startswith(prefix)))

    def close(self) -> None:
        """Nothing is held between calls."""

    def _path(self, key: str) -> Path:
        return self._folder / (quote(key, safe="=") + SUFFIX)

    def _read(self, key: str) -> Document | None:
        try:
            stored = json.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateUnavailable(f"state {key!r} cannot be read from {self._path(key)}: {error.strerror}") from error
        except ValueError as error:
            raise _Corrupt(f"it is not JSON ({error})") from error
        if not isinstance(stored, dict) or stored.keys() != {"version", "value"} or not isinstance(stored["version"], int):
            raise _Corrupt("it does not hold a version and a value")
        return Document(stored["value"], stored["version"])

    def _read_or_set_aside(self, key: str) -> Document | None:
        """Under the lock."""
        try:
            return self._read(key)
        except _Corrupt as damage:
            path = self._path(key)
            aside = path.with_name(f"{path.name}.corrupt")
            os.replace(path, aside)
            logger.warning("state %r starts empty, its file cannot be used: %s; it was moved to %s", key, damage, aside)
            return None

    def _write(self, key: str, text: str) -> None:
        new = self._folder / f".new-{os.getpid()}-{threading.get_ident()}"
        with new.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path(key))
        self._sync_folder()

    def _sync_folder(self) -> None:
        """A rename is durable only after its folder is synced."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time; the kernel frees the lock of a dead one. Disk errors become StateUnavailable."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self._folder / ".lock").open("w") as lock:
                self._acquire(lock)
                if not self._has_written:
                    for leftover in self._folder.glob(".new-*"):  # of killed writers
                        leftover.unlink(missing_ok=True)
                    self._has_written = True
                yield
        except OSError as error:
            raise StateUnavailable(f"state in {self._folder} cannot be changed: {error.strerror}") from error

    def _acquire(self, lock: IO[str]) -> None:
        deadline_s = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise StateUnavailable(f"somebody else has held {lock.name} for {LOCK_DEADLINE_S} s") from error
                time.sleep(LOCK_POLL_S)


class _Corrupt(Exception):
    """A state file has invalid content."""
