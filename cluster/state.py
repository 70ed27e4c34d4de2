"""State that outlives a process: small JSON documents by key, such as profiles and learned estimates.

Implementations: files (the default) and Redis. Calls block, until a deadline at most: not for event loops.
"""

import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import quote, unquote

from pydantic import JsonValue

from cluster.config import StateConfig
from cluster.errors import InvalidField, OutriderError

logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 2**20
MAX_KEY_LEN = 80
_PROBE = "probe"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/=-]*")


class StateConflict(OutriderError):
    """The document has changed since it was read: read it and decide again."""

    def __init__(self, key: str, expected_version: int, found_version: int) -> None:
        super().__init__(f"state {key!r} has version {found_version}, expected was {expected_version}: read it again")


class StateUnavailable(OutriderError):
    """The store did not answer, cannot be written, or is locked. Serving continues without it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A value and its version: the number of writes since the key was created."""

    value: JsonValue
    version: int


class StateStore(Protocol):
    """Thread-safe; processes may share it. Methods may raise StateUnavailable, and InvalidField for an unsound key.

    Keys are short paths such as ``profile/smollm2-135m/cpu``.
    """

    def get(self, key: str) -> Document | None: ...

    def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
        """Writes a whole document and returns its version: 1 for a new key.

        Raises StateConflict, and writes nothing, unless the document has ``expected_version`` (0: it does not exist), and
        InvalidField if the value is not JSON or larger than MAX_DOCUMENT_BYTES.
        """

    def delete(self, key: str) -> None:
        """Ignores unknown keys."""

    def keys(self, prefix: str = "") -> tuple[str, ...]:
        """All keys that begin with ``prefix``, sorted."""

    def close(self) -> None:
        """Idempotent."""


def open_store(config: StateConfig, namespace: str, deadline_s: float = 2.0) -> StateStore:
    """The store of a resolved configuration. ``deadline_s`` of each call to Redis. Does no I/O: an
    unusable store shows at the first call."""
    if config.url is None:
        return FileStateStore(config.folder / namespace)
    from cluster.state_redis import RedisStateStore

    return RedisStateStore(config, namespace, deadline_s)


def state_fault(store: StateStore) -> str | None:
    """Why the store cannot be written now; None: it can. Serving continues, but learned estimates are lost."""
    try:
        store.put(_PROBE, "test of write access")
        store.delete(_PROBE)
    except StateUnavailable as error:
        return str(error)
    return None


def check_key(key: str) -> None:
    """Raises InvalidField for a key that some implementation cannot store."""
    if len(key) > MAX_KEY_LEN or not _KEY.fullmatch(key):
        raise InvalidField("key", key, f"must have at most {MAX_KEY_LEN} letters, digits and ._/=-, a letter or digit first")


def encode(key: str, value: JsonValue) -> str:
    """The value's JSON text. Raises InvalidField if it is not JSON, or too large."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidField(key, value, f"must be JSON ({error})") from error
    if len(text) > MAX_DOCUMENT_BYTES:  # json.dumps writes ASCII
        raise InvalidField(key, len(text), f"must have at most {MAX_DOCUMENT_BYTES} bytes as JSON")
    return text


def next_version(key: str, found: int, expected: int | None) -> int:
    """Raises StateConflict unless ``found`` is expected; 0 stands for a missing document."""
    if expected is not None and expected != found:
        raise StateConflict(key, expected, found)
    return found + 1


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
