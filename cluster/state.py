"""What must outlive a process: small JSON documents by key, such as profiles and what the router learned.

Implementations: files (the default), Redis (`cluster.state_redis`), and memory, their twin for tests. Calls block, each for
at most a deadline: not for event loops.
"""

import json
import re
import threading
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from cluster.config import FileStateConfig, StateConfig
from cluster.errors import InvalidField, OutriderError

MAX_DOCUMENT_BYTES = 2**20
MAX_KEY_LEN = 80
_PROBE = "probe"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/=-]*")


class StateConflict(OutriderError):
    """Somebody else changed a document since it was read: read it again, and decide again."""

    def __init__(self, key: str, expected_version: int, found_version: int) -> None:
        super().__init__(f"state {key!r} has version {found_version}, expected was {expected_version}: read it again")
        self.key = key
        self.expected_version = expected_version
        self.found_version = found_version

    def __reduce__(self) -> tuple[type["StateConflict"], tuple[str, int, int]]:
        return (StateConflict, (self.key, self.expected_version, self.found_version))


class StateUnavailable(OutriderError):
    """The store cannot be used now: it did not answer, cannot be written, or is locked. Serving goes on without it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A value, and how often it was written since its key came to be."""

    value: JsonValue
    version: int


class StateStore(Protocol):
    """Thread-safe; may be shared by processes. Keys are short paths such as ``profile/smollm2-135m/cpu``.

    Every method may raise StateUnavailable, and InvalidField for a key that is too long or has other characters.
    """

    def get(self, key: str) -> Document | None: ...

    def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
        """Writes a document whole, and returns its version: 1 for a new key.

        With ``expected_version`` only if it has that version still; 0 expects that it does not exist.

        Raises:
            StateConflict: it has another version; nothing was written.
            InvalidField: the value is not JSON, or larger than MAX_DOCUMENT_BYTES.
        """

    def delete(self, key: str) -> None:
        """Unknown keys are ignored."""

    def keys(self, prefix: str = "") -> tuple[str, ...]:
        """All that begin with ``prefix``, sorted."""

    def close(self) -> None:
        """Idempotent."""


class MemoryStateStore:
    """The twin for tests, and for whoever wants to keep nothing."""

    def __init__(self) -> None:
        self._documents: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> Document | None:
        check_key(key)
        with self._lock:
            found = self._documents.get(key)
        return None if found is None else Document(json.loads(found[0]), found[1])

    def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
        check_key(key)
        text = encode(key, value)
        with self._lock:
            version = next_version(key, self._documents.get(key, ("", 0))[1], expected_version)
            self._documents[key] = (text, version)
        return version

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._documents.pop(key, None)

    def keys(self, prefix: str = "") -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(key for key in self._documents if key.startswith(prefix)))

    def close(self) -> None:
        """Nothing is held."""


def open_store(config: StateConfig, namespace: str) -> StateStore:
    """The store of a resolved configuration; deployments of different namespaces do not see each other's documents.

    Opening does nothing yet: a folder that cannot be used, or a Redis that is away, is met with the first call.
    """
    if isinstance(config, FileStateConfig):
        from cluster.state_file import FileStateStore

        return FileStateStore(config.folder / namespace)
    from cluster.state_redis import RedisStateStore

    return RedisStateStore(config, namespace)


def state_fault(store: StateStore) -> str | None:
    """Why nothing can be written now; None: it can. Serving goes on without a store, and what is learned is lost."""
    try:
        store.put(_PROBE, "written to see whether it can be")
        store.delete(_PROBE)
    except StateUnavailable as error:
        return str(error)
    return None


def check_key(key: str) -> None:
    """Raises InvalidField for what not every implementation could store."""
    if len(key) > MAX_KEY_LEN or not _KEY.fullmatch(key):
        raise InvalidField("key", key, f"must have at most {MAX_KEY_LEN} letters, digits and ._/=-, a letter or digit first")


def encode(key: str, value: JsonValue) -> str:
    """The value's JSON text. Raises InvalidField where it has none, or too much."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidField(key, value, f"must be JSON ({error})") from error
    if len(text) > MAX_DOCUMENT_BYTES:  # json.dumps writes ASCII
        raise InvalidField(key, len(text), f"must have at most {MAX_DOCUMENT_BYTES} bytes as JSON")
    return text


def next_version(key: str, found: int, expected: int | None) -> int:
    """Raises StateConflict where ``found``, 0 for a missing document, is not what the writer expects."""
    if expected is not None and expected != found:
        raise StateConflict(key, expected, found)
    return found + 1
