"""A StateStore in memory."""

import json
import threading

from pydantic import JsonValue

from cluster.state import Document, check_key, encode, next_version


class MemoryStateStore:
    """Thread-safe; keeps nothing after the process."""

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
