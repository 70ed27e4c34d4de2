"""The sections ``api`` and ``slo``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.config.section import Count, Milliseconds, Name, Seconds, Section, former
from cluster.types import Slo

# `deploy.api.tool_formats.forms` and `deploy.api.tools` hold them; most are names of vLLM's parsers.
ToolCallParser = Literal[
    "none",
    "hermes",
    "qwen3_json",
    "granite4",
    "llama3_json",
    "llama4_json",
    "mistral",
    "mistral_v11",
    "openai",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "glm45",
    "glm47",
    "qwen3_coder",
    "qwen3_xml",
    "minimax_m2",
    "granite",
    "pythonic",
    "llama4_pythonic",
    "gemma3",
    "olmo3",
]
ReasoningParser = Literal[
    "none",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax_m2",
    "olmo3",
    "mistral",
    "seed_oss",
    "openai_gptoss",
]

CUSTOM = "custom"  # class of requests that state objectives of their own

TtftMs = Annotated[float, Field(ge=0.001, le=600_000)]  # in seconds above 0, too


class SloClass(Section):
    """Objectives of a class. A class without any is best effort."""

    ttft_ms: TtftMs | None = None  # time to first token
    tpot_ms: Milliseconds | None = None  # mean time per token after the first

    def objectives(self, name: str) -> Slo:
        """As requests carry them."""
        ttft_s, tpot_s = (None if ms is None else ms / 1e3 for ms in (self.ttft_ms, self.tpot_ms))
        return Slo(ttft_s, tpot_s, name)


class SloConfig(Section):
    """Service-level objectives. Without classes and without objectives in calls, all requests are best effort."""

    classes: Annotated[Mapping[Name, SloClass], Field(max_length=32)] = {}
    default: Name | None = None  # class of calls that name none; None: best effort
    shed: bool = True  # refuse calls whose time to first token cannot be met, with 429

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if CUSTOM in self.classes:
            raise ValueError(f"classes must not be named {CUSTOM!r}: so are calls that state objectives of their own")
        if self.default is not None and self.default not in self.classes:
            known = ", ".join(self.classes) or "there are none"
            raise ValueError(f"default must be one of classes ({known}), got {self.default!r}")
        return self


Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$", max_length=256)]


class ApiConfig(Section):
    """The HTTP server and its limits."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    # Processes that answer clients. Each gets an equal part of the limits below and of the tenants'.
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    max_replicas: Annotated[int, Field(ge=1, le=64)] | None = None  # up to which their number follows the load; None: fixed
    api_keys_file: Path | None = None  # one key per line, or tenants with limits; None: no authentication
    operator_keys_file: Path | None = None  # further keys, which may also switch the policy and adapters; None: nobody may
    lora_folder: Path | None = None  # of adapters that may be loaded while it serves; None: none may
    share_between_keys: bool = False  # whether a tenant profits from what others left in caches and drafters
    max_concurrent_requests: Count = 256  # sequences in flight in all replicas; further calls are queued
    max_queued_requests: Count = 256  # queued calls in all replicas; more are refused with 429
    request_deadline_s: Seconds = 600
    # Of a stream whose target is lost, for another if there is none; a link that only broke is back by then.
    resume_wait_s: Annotated[float, Field(ge=0, le=3600)] = 2
    # For requests under way when the server is told to stop; what is not complete then ends with an error.
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 10
    unknown_fields: Literal["warn", "refuse"] = "warn"  # warn: ignored, and named in a header
    # The form of tool calls, and of reasoning before an answer. None: as the model's chat template writes them.
    tool_call_parser: ToolCallParser | None = None
    reasoning_parser: ReasoningParser | None = None
    cors_origins: tuple[Origin, ...] = ()  # allowed CORS origins, such as https://chat.example; "*": all
    removed = former("max_choices", max_body_bytes="it follows from model.max_model_len")

    @property
    def most(self) -> int:
        """Replicas at any time."""
        return self.max_replicas or self.replicas

    @model_validator(mode="after")
    def _replicas_fit(self) -> Self:
        name = "replicas" if self.max_replicas is None else "max_replicas"
        bounds = ("max_concurrent_requests", "max_queued_requests")
        for low, value, high in (("replicas", self.replicas, name), *((name, self.most, bound) for bound in bounds)):
            if value > (getattr(self, high) or 0):
                raise ValueError(f"{low} ({value}) must be at most {high} ({getattr(self, high)})")
        return self
