"""Limits and settings of the HTTP API."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from cluster.config import ApiConfig, ObservabilityConfig, ReasoningParser, SloConfig, ToolCallParser
from cluster.config.file import ModelConfig
from cluster.errors import InvalidField, ModelUnavailable
from cluster.sampling_params import SCALARS, SamplingParams

# Calls beyond those running or queued: bodies being received, answers being sent.
SPARE_CALLS = 64
MAX_CHOICES = 16  # n of one call
_NO_DEFAULTS = ("min_tokens", "ignore_eos")  # of a model's file: they contradict the max_tokens of calls, or never end
_DEFAULTS = ApiConfig()
_NO_CLASSES = SloConfig()
_UNOBSERVED = ObservabilityConfig()
TOKEN_BYTES = 16  # of JSON: an id of seven digits with its comma has 9, text is mostly shorter
MAX_PROMPTS_BYTES = 64 * 2**20  # of a body with many prompts; one with a single prompt may be longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Limits are those of one process. A *sequence* is one choice of one prompt: a call has ``prompts * n`` sequences."""

    num_replicas: int = _DEFAULTS.replicas  # of the API, at least; `Service.divide` is told how many there are
    max_replicas: int | None = None  # None: their number is fixed
    api_keys_file: Path | None = _DEFAULTS.api_keys_file  # None: no key is asked for
    operator_keys_file: Path | None = _DEFAULTS.operator_keys_file  # None: there are no operators
    lora_folder: Path | None = _DEFAULTS.lora_folder  # None: no adapters while it runs
    share_between_keys: bool = _DEFAULTS.share_between_keys
    max_request_bytes: int = 4 * 2**20
    max_held_bytes: int = 64 * 2**20  # of all bodies being read
    max_concurrent: int = _DEFAULTS.max_concurrent_requests  # sequences running at once
    max_queued: int = _DEFAULTS.max_queued_requests  # calls waiting for admission
    max_concurrent_requests: int | None = None  # the former of all replicas together; None: ``num_replicas`` times as many
    max_queued_requests: int | None = None  # and the latter
    max_n: int = MAX_CHOICES
    max_sequences: int = 64  # of one call
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)  # fields of SamplingParams
    body_timeout_s: float = 30.0  # to receive the whole request body
    stall_timeout_s: float = 120.0  # a client that reads nothing for this time is taken for gone
    send_error_timeout_s: float = 5.0
    keys_refresh_s: float = 5.0  # between looks at the files of keys
    request_timeout_s: float = float(_DEFAULTS.request_deadline_s)  # from the arrival of a call to the end of its answer
    engine_timeout_s: float = 2.0  # of calls to the cluster other than generation
    status_ttl_s: float = 1.0  # how long the cluster's status is cached
    retry_after_s: float = 1.0  # Retry-After of 429 and 503
    unknown_fields: Literal["warn", "refuse"] = _DEFAULTS.unknown_fields
    tool_call_parser: ToolCallParser | None = _DEFAULTS.tool_call_parser
    reasoning_parser: ReasoningParser | None = _DEFAULTS.reasoning_parser
    cors_origins: tuple[str, ...] = _DEFAULTS.cors_origins  # web pages that may read answers; "*": all
    slo: SloConfig = _NO_CLASSES  # classes that calls may name
    observability: ObservabilityConfig = _UNOBSERVED

    @property
    def most(self) -> int:
        """Replicas of the API at any time."""
        return self.max_replicas or self.num_replicas

    @property
    def max_calls(self) -> int:
        """At once."""
        return self.max_concurrent + self.max_queued + SPARE_CALLS

    def for_len(self, max_model_len: int) -> "ApiSettings":
        """With bodies as long as prompts of ``max_model_len`` tokens need, as ids or text, as many as a call may have."""
        prompt_bytes = TOKEN_BYTES * max_model_len
        max_request_bytes = max(
            self.max_request_bytes, prompt_bytes, min(self.max_sequences * prompt_bytes, MAX_PROMPTS_BYTES)
        )
        max_held_bytes = max(self.max_held_bytes, 2 * max_request_bytes)
        return replace(self, max_request_bytes=max_request_bytes, max_held_bytes=max_held_bytes)

    @classmethod
    def from_config(
        cls, config: ApiConfig, slo: SloConfig = _NO_CLASSES, observability: ObservabilityConfig = _UNOBSERVED
    ) -> "ApiSettings":
        """From sections of the configuration. Other limits keep their defaults or follow from it.

        Running sequences and queued calls are divided among the replicas and rounded down, so that all together never exceed
        what is configured.
        """
        max_concurrent, max_queued = (
            limit // config.replicas for limit in (config.max_concurrent_requests, config.max_queued_requests)
        )
        max_sequences = min(max(cls().max_sequences, MAX_CHOICES), config.max_concurrent_requests // config.most)
        same = {one.name: getattr(config, one.name) for one in fields(cls) if one.name in type(config).model_fields}
        return cls(
            **same,
            num_replicas=config.replicas,
            max_concurrent=max_concurrent,
            max_queued=max_queued,
            max_sequences=max_sequences,
            max_n=min(MAX_CHOICES, max_sequences),
            request_timeout_s=float(config.request_deadline_s),
            slo=slo,
            observability=observability,
        )


def sampling_defaults(model: ModelConfig, folder: Path) -> Mapping[str, float | int]:
    """Fields of SamplingParams by name, of the model in ``folder``; empty without the file, or if it is to be ignored.

    Raises ModelUnavailable: the file cannot be read, or has a value that no request may have.
    """
    path = folder / "generation_config.json"
    if model.generation_config == "none" or not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error
    names = {name: name for name in SCALARS if name not in _NO_DEFAULTS} | {"max_new_tokens": "max_tokens"}
    found = {field: raw[name] for name, field in names.items() if raw.get(name) is not None}
    found = {name: value for name, value in found.items() if name not in SCALARS or value not in SCALARS[name][1].off}
    try:
        SamplingParams(**{"max_tokens": 1, **found})
    except (InvalidField, TypeError) as error:
        raise ModelUnavailable(f"{path}: {error}; model.generation_config: none ignores the file's values") from error
    return found
