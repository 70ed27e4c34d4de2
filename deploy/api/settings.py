"""What an operator may set of the HTTP API."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.config import ApiConfig
from cluster.errors import InvalidField

_DEFAULTS = ApiConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Limits hold per process. A *sequence* is one choice of one prompt: a call has ``prompts * n`` of them.

    Raises:
        InvalidField: a limit is not positive, or two of them contradict each other.
    """

    api_keys_file: Path | None = _DEFAULTS.api_keys_file  # None: everybody who reaches the port may call
    max_request_bytes: int = _DEFAULTS.max_body_bytes
    max_held_bytes: int = 64 * 2**20  # of all bodies that are being read
    max_prompt_tokens: int | None = None  # None: whatever the model's context holds
    max_concurrent: int = _DEFAULTS.max_concurrent_requests  # sequences running at once
    max_queued: int = _DEFAULTS.max_queued_requests  # calls waiting for their turn
    max_n: int = _DEFAULTS.max_choices
    max_sequences: int = 64  # of one call
    default_max_tokens: int = 2048  # of a chat answer whose caller names no limit
    body_timeout_s: float = 30.0  # until the whole request body has come
    request_timeout_s: float = float(_DEFAULTS.request_deadline_s)  # from the first byte of a call to the last of its answer
    engine_timeout_s: float = 2.0  # for a question to the cluster that is not a generation
    retry_after_s: float = 1.0  # advice to callers that found a full queue or no target
    unknown_fields: Literal["warn", "refuse"] = _DEFAULTS.unknown_fields
    cors_origins: tuple[str, ...] = _DEFAULTS.cors_origins  # of web pages that may read answers; "*": of all

    @classmethod
    def from_config(cls, config: ApiConfig) -> "ApiSettings":
        """The section ``api`` of the configuration; the other limits follow from it or keep their defaults."""
        max_sequences = min(max(cls().max_sequences, config.max_choices), config.max_concurrent_requests)
        return cls(
            api_keys_file=config.api_keys_file,
            max_request_bytes=config.max_body_bytes,
            max_held_bytes=max(cls().max_held_bytes, 2 * config.max_body_bytes),
            max_concurrent=config.max_concurrent_requests,
            max_queued=config.max_queued_requests,
            max_sequences=max_sequences,
            max_n=min(config.max_choices, max_sequences),
            request_timeout_s=float(config.request_deadline_s),
            unknown_fields=config.unknown_fields,
            cors_origins=config.cors_origins,
        )

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                raise InvalidField(name, value, "must be greater than 0")
        if self.max_request_bytes > self.max_held_bytes:
            raise InvalidField(
                "max_request_bytes", self.max_request_bytes, f"must be at most max_held_bytes ({self.max_held_bytes})"
            )
        if self.max_sequences > self.max_concurrent:
            raise InvalidField(
                "max_sequences", self.max_sequences, f"must be at most max_concurrent ({self.max_concurrent})"
            )
        if self.max_n > self.max_sequences:
            raise InvalidField("max_n", self.max_n, f"must be at most max_sequences ({self.max_sequences})")
