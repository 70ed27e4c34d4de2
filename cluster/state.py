"""State that outlives a process: small JSON documents by key, such as profiles and learned estimates.

Implementations: files (the default) and Redis. Calls block, until a deadline at most: not for event loops.
"""

import json
import re
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from cluster.config import StateConfig
from cluster.errors import InvalidField, OutriderError

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
        from cluster.state_file import FileStateStore

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
