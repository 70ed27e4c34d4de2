"""State in Redis, which survives the loss of any other machine of the cluster."""

import json
import logging
import random
import time
import uuid
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import redis
from pydantic import JsonValue
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from cluster.config import StateConfig
from cluster.state import Document, StateConflict, StateUnavailable, check_key, encode

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Attempts within a deadline if Redis hangs.
NUM_SLOW_ATTEMPTS = 3
MIN_BACKOFF_S = 0.01
MAX_BACKOFF_S = 0.25

# A document is a hash of version, value and an id of the last write, which distinguishes a retry from a conflict.
_PUT = """
local stored = redis.call('HMGET', KEYS[1], 'version', 'writer')
local found = tonumber(stored[1]) or 0
if stored[2] == ARGV[2] then return {1, found} end
if ARGV[3] ~= '' and tonumber(ARGV[3]) ~= found then return {0, found} end
redis.call('HSET', KEYS[1], 'version', found + 1, 'value', ARGV[1], 'writer', ARGV[2])
return {1, found + 1}
"""


class RedisStateStore:
    """Reconnects within the deadline of a call, with exponential, jittered back-off."""

    def __init__(self, config: StateConfig, namespace: str, deadline_s: float) -> None:
        self._config = config
        assert config.url is not None
        self._url, self._deadline_s = config.url, deadline_s
        self._attempt_s = deadline_s / NUM_SLOW_ATTEMPTS
        self._prefix = f"{namespace}:state:"

    @cached_property
    def _client(self) -> redis.Redis:
        """Made by the first call, which reports an unreadable password file; the next call reads it again."""
        return redis.Redis.from_url(
            self._url,
            password=_password(self._config),
            socket_timeout=self._attempt_s,
            socket_connect_timeout=self._attempt_s,
            retry=Retry(NoBackoff(), 0),  # _call retries within the deadline
            decode_responses=True,
        )

    @cached_property
    def _put(self) -> Script:
        return self._client.register_script(_PUT)

    def get(self, key: str) -> Document | None:
        check_key(key)
        try:
            stored: Any = self._call(lambda: self._client.hmget(self._prefix + key, ["version", "value"]))
            return None if stored == [None, None] else Document(json.loads(stored[1]), int(stored[0]))
        except (TypeError, ValueError) as error:  # a field is missing, or not JSON, a number or UTF-8
            logger.warning("state %r counts as absent, it is not JSON: %s", key, error)
            return None

    def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
        check_key(key)
        arguments = [encode(key, value), uuid.uuid4().hex, "" if expected_version is None else str(expected_version)]
        written, version = self._call(lambda: self._put(keys=[self._prefix + key], args=arguments))
        if not written:
            raise StateConflict(key, expected_version or 0, version)
        return int(version)

    def delete(self, key: str) -> None:
        check_key(key)
        self._call(lambda: self._client.delete(self._prefix + key))

    def keys(self, prefix: str = "") -> tuple[str, ...]:
        found = self._call(lambda: set(self._client.scan_iter(match=f"{self._prefix}*", count=1000)))
        keys = (str(key).removeprefix(self._prefix) for key in found)
        return tuple(sorted(key for key in keys if key.startswith(prefix)))

    def close(self) -> None:
        if "_client" in self.__dict__:
            self._client.close()

    def _call(self, attempt: Callable[[], T]) -> T:
        deadline_s = time.monotonic() + self._deadline_s
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                return attempt()
            except redis.AuthenticationError as error:  # a ConnectionError that retries cannot fix
                raise StateUnavailable(f"Redis at {self._url} refused: {error}") from error
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError) as error:
                pause_s = backoff_s * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s + self._attempt_s > deadline_s:
                    late = f"Redis at {self._url} did not answer in {self._deadline_s} s"
                    raise StateUnavailable(f"{late}: {error}") from error
                logger.info("Redis at %s: %s; trying again in %.0f ms", self._url, error, 1e3 * pause_s)
                time.sleep(pause_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            except redis.RedisError as error:
                raise StateUnavailable(f"Redis at {self._url} refused: {error}") from error


def _password(config: StateConfig) -> str | None:
    if config.password_file is None:
        return None
    try:
        return config.password_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StateUnavailable(f"cluster.state.password_file: {config.password_file} cannot be read ({reason})") from error
