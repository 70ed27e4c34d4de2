"""The whole file: the other sections, cross-checks, reading and printing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationInfo, field_validator, model_validator

from cluster import strict_yaml
from cluster.config.adapters import LoraModule
from cluster.config.drafters import DEFAULT_DRAFTERS, DrafterConfig, VllmOptions, parts_of
from cluster.config.parsers import ReasoningParser, ToolCallParser
from cluster.config.rules import PlannerConfig, RouterConfig
from cluster.config.section import (
    Auto,
    Count,
    Device,
    Engine,
    Fraction,
    Milliseconds,
    Name,
    Replicated,
    Resources,
    Seconds,
    Section,
    TargetDtype,
)
from cluster.config.slo import SloConfig
from cluster.config.vllm_arguments import check_arguments
from cluster.model_name import public_name
from cluster.types import FREE_DRAFTERS


class ModelConfig(Section):
    """The served model."""

    # An embedded model (`outrider models`), a folder, or ORG/MODEL[@REVISION] of a Hugging Face hub.
    name: str = Field(default="smollm2-135m", min_length=1)
    served_names: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # of the API, the first in its answers; []: its own
    # Prompt and output together; at most the model's own. auto: as many as the model and the KV cache allow.
    max_model_len: Count | Auto = 2048
    # model: calls without sampling parameters get those of the model's generation_config.json; none: OpenAI's defaults.
    generation_config: Literal["model", "none"] = "model"

    @property
    def public_names(self) -> tuple[str, ...]:
        """What clients may call it; never empty."""
        return self.served_names or (public_name(self.name),)


UNIX = "unix"  # as the host of links: unix sockets
LONG_PASS = 2048  # rows, as vLLM takes by default


class TargetConfig(Replicated):
    """The verifying engine and its replicas."""

    engine: Engine = "auto"  # vllm: in an environment of its own (`make setup-vllm`); auto: there, on a GPU; else native
    dtype: TargetDtype = "auto"  # float16: on the vllm engine
    device: Device = "auto"
    replicas: Count = 1  # at start
    min_replicas: Count | None = None  # None: as replicas
    max_replicas: Count | None = None
    tensor_parallel: Count = 1  # ranks of one replica; at most the model's key-value heads
    block_len: Literal[16, 32, 64] = 32  # tokens of a KV cache block
    # Of one rank. auto: 0.5 on a CPU; on a GPU what weights, passes and colocated drafters leave of gpu_memory_utilization.
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] | Auto = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9  # of the GPU that resources.gpus gives it
    max_num_sequences: Count = 64  # running at once in one replica
    # auto: 512 and 256 rows for the native engine on a CPU, whose passes have next to no fixed cost, else 2,048 of both.
    max_pass_tokens: Count | Auto = "auto"  # rows of one packed pass
    prefill_chunk_len: Count | Auto = "auto"  # rows of all prompts in a pass, beside live streams
    # auto: rows of draft tokens that will not be accepted leave a pass between its layers, while that saves time.
    early_exit: Literal["auto", "off"] = "off"
    # Drafters in the target's process draft in a part of its device while it verifies in the other, or by turns with it.
    # auto: whichever `outrider profile` has measured to be faster, without a profile by turns; on: in parts; off: by turns.
    partition: Literal["auto", "on", "off"] = "auto"
    resources: Resources = Resources()  # of one rank
    vllm: Mapping[str, Any] = {}  # engine vllm: further arguments of its EngineArgs, such as quantization
    lora_modules: tuple[LoraModule, ...] = Field(default=(), max_length=256)  # engine vllm

    @property
    def num_adapters(self) -> int:
        """LoRA adapters at once, each with a place in every layer: ``max_loras``, and all of ``lora_modules``."""
        if not (self.lora_modules or self.vllm.get("enable_lora")):
            return 0
        return max(int(self.vllm.get("max_loras", 1)), len(self.lora_modules))

    @property
    def kv_cache_bytes(self) -> int:
        """``kv_cache_gb`` as a number."""
        return int(2**30 * (0.5 if self.kv_cache_gb == "auto" else self.kv_cache_gb))

    @property
    def can_divide(self) -> bool:
        """Whether its device may be divided with drafters: one process computes, on threads and streams of ours."""
        return self.engine != "vllm" and self.tensor_parallel == 1

    @property
    def longest_pass(self) -> int:
        """Rows; ``max_pass_tokens`` as a number. Every running sequence computes a token in each pass."""
        usual = max(LONG_PASS if self._has_fixed_cost else 512, self.max_num_sequences)
        return usual if self.max_pass_tokens == "auto" else self.max_pass_tokens

    @property
    def longest_chunk(self) -> int:
        """Rows; ``prefill_chunk_len`` as a number."""
        usual = min(LONG_PASS if self._has_fixed_cost else 256, self.longest_pass)
        return usual if self.prefill_chunk_len == "auto" else self.prefill_chunk_len

    @property
    def _has_fixed_cost(self) -> bool:
        return self.engine == "vllm" or self.device == "cuda"

    @field_validator("block_len")
    @classmethod
    def _block_fits_engine(cls, block_len: int, info: ValidationInfo) -> int:
        if info.data.get("engine") == "vllm" and block_len % 32:
            raise ValueError(f"must be 32 or 64 on the vllm engine, got {block_len}")
        return block_len

    @field_validator("vllm")
    @classmethod
    def _arguments_fit(cls, arguments: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        if arguments and info.data.get("engine") != "vllm":
            raise ValueError("must be empty unless engine is vllm")
        check_arguments(arguments)
        return arguments

    @field_validator("lora_modules")
    @classmethod
    def _adapters_fit(cls, modules: tuple[LoraModule, ...], info: ValidationInfo) -> tuple[LoraModule, ...]:
        if modules and info.data.get("engine") != "vllm":
            raise ValueError("must be empty on the native engine, whose layers take no low-rank changes: set engine to vllm")
        if len({module.name for module in modules}) < len(modules):
            raise ValueError(f"names must differ, got {[module.name for module in modules]}")
        return modules

    @field_validator("dtype")
    @classmethod
    def _dtype_fits_engine(cls, dtype: str, info: ValidationInfo) -> str:
        if dtype == "float16" and info.data.get("engine") != "vllm":
            raise ValueError("must be auto, bfloat16 or float32 on the native engine, got 'float16'")
        return dtype

    @field_validator("early_exit")
    @classmethod
    def _early_exit_fits_engine(cls, early_exit: str, info: ValidationInfo) -> str:
        if early_exit == "off":
            return early_exit
        if info.data.get("engine") == "vllm":
            raise ValueError("must be off on the vllm engine, got 'auto': its passes cannot be stopped between layers")
        if info.data.get("tensor_parallel", 1) > 1:
            raise ValueError(
                "must be off with tensor_parallel above 1, got 'auto': rows would have to leave all ranks alike"
            )
        if info.data.get("device") == "cuda":
            raise ValueError("must be off on cuda, got 'auto': rows leave passes on CPUs only so far")
        return early_exit

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.resources.check_device(self.device)
        if self.partition == "on" and not self.can_divide:
            raise ValueError("partition must be auto or off on the vllm engine or with several ranks, got 'on'")
        if self.tensor_parallel > 1 and self.resources.gpus != "auto" and 0 < self.resources.gpus < 1:
            raise ValueError(
                f"resources.gpus must be auto or a whole number with tensor_parallel above 1, got {self.resources.gpus}: "
                "NCCL refuses two ranks on one GPU"
            )
        for name, value in (("prefill_chunk_len", self.longest_chunk), ("max_num_sequences", self.max_num_sequences)):
            if value > self.longest_pass:
                raise ValueError(f"{name} ({value}) must be at most max_pass_tokens ({self.longest_pass})")
        return self


class MemoryConfig(Section):
    """Memory for drafters outside of the targets' processes. None: the machine's, less the targets' and a reserve."""

    cpu_gb: Annotated[float, Field(gt=0, le=65536)] | None = None  # per machine, for drafters on CPUs
    gpu_gb: Annotated[float, Field(gt=0, le=4096)] | None = None  # per GPU of drafters
    min_residence_s: Seconds = 20  # minimum time that a drafter stays loaded


class TransportConfig(Section):
    """Links between drafters, gateways and targets: unix sockets on one machine, gRPC between machines."""

    host: str = "auto"  # gRPC's listening address; auto: unix sockets on one machine, else all interfaces
    removed = frozenset({"kind"})

    @property
    def kind(self) -> Literal["unix", "grpc"]:
        """Of a resolved configuration."""
        return "unix" if self.host == UNIX else "grpc"


Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$", max_length=256)]


class ApiConfig(Section):
    """The HTTP server and its limits."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    # Processes that answer clients. Each gets an equal part of the limits below and of the tenants'.
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    api_keys_file: Path | None = None  # one key per line, or tenants with limits; None: no authentication
    operator_keys_file: Path | None = None  # further keys, which may also switch the policy and adapters; None: nobody may
    lora_folder: Path | None = None  # of adapters that may be loaded while it serves; None: none may
    share_between_keys: bool = False  # whether a tenant profits from what others left in caches and drafters
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = 4 * 2**20
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
    at_most = (("replicas", "max_concurrent_requests"), ("replicas", "max_queued_requests"))
    removed = frozenset({"max_choices"})


class ObservabilityConfig(Section):
    """Traces and logs of the API's processes."""

    # Base URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318. None: no traces.
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s?#@]+(/[^\s?#@]*)?$", max_length=1024)] | None = None
    sampled_share: Fraction = 1.0  # of calls whose caller sends no decision in traceparent
    log_format: Literal["text", "json"] = "text"  # json: with ids of requests, and a line for each request
    audit_log_file: Path | None = None  # one JSON line for each call, without prompts and answers


_REDIS = "redis://127.0.0.1:6379/0"


class StateConfig(Section):
    """Where the cluster keeps its state."""

    kind: Literal["file", "redis"] = "file"  # redis: for clusters that must survive the loss of the head
    folder: Path = Path("~/.local/state/outrider")  # file
    url: str = _REDIS  # redis
    password_file: Path | None = None  # of Redis: keeps the secret out of this file
    removed = frozenset({"deadline_s"})

    @model_validator(mode="after")
    def _usable(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"url must start with redis://, rediss:// or unix://, got {parts.scheme!r}")
        if parts.password is not None:
            raise ValueError("url must not hold a password: put it into a file and name that in password_file")
        if self.kind == "file" and (self.password_file, self.url) != (None, _REDIS):
            raise ValueError("url and password_file are of kind redis: set kind, or leave them out")
        return self


class TlsConfig(Section):
    """Mutual TLS on links between machines. PEM files, which each process reads on its own machine."""

    cert_file: Path  # for the DNS name outrider-node; with intermediate certificates, if any
    key_file: Path  # its private key, not accessible to others
    ca_file: Path  # authorities whose certificates are accepted


class ClusterConfig(Section):
    """The Ray cluster, and what its processes know each other by."""

    namespace: Name = "outrider"  # separates deployments on one Ray cluster
    ray_address: str | None = None  # of a running cluster; None: starts one on this machine
    ray_auth: Literal["token", "none"] = "token"  # none: also joins a cluster that runs code for whoever reaches it
    token_file: Path | None = None  # shared secret of all links; None: random at each launch
    tls: TlsConfig | None = None  # None: links are authenticated by the secret, and not encrypted
    state: StateConfig = StateConfig()


class SupervisionConfig(Section):
    """Detection of dead processes, and restarts."""

    health_timeout_ms: Milliseconds = 3000  # a process that does not answer is killed and restarted
    start_timeout_s: Seconds = 300  # until the first successful health check
    quarantine_restarts: Count = 5  # restarts within a minute after which a drafter is left out for two
    removed = frozenset(
        {"health_period_ms", "restart_backoff_ms", "max_restart_backoff_ms", "quarantine_window_s", "quarantine_s"}
    )


class ScalingConfig(Section):
    """Replicas between ``min_replicas`` and ``max_replicas`` of the target and of each drafter."""

    drain_s: Seconds = 60  # for the running requests of a target that leaves; what remains goes on at another target
    policy: Literal["none", "outrider"] = "none"  # outrider: the numbers follow the load, by the objectives of slo.default
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.99  # goal: share of requests that meet their objectives
    target_start_s: Seconds = 60  # of a target, from the decision to its first request, with a machine's if that starts too
    # fixed: the machines are paid anyway, so that drafters use what is idle and give it up to targets. elastic: machines
    # come and go with the replicas, as under KubeRay's autoscaler.
    hardware: Literal["fixed", "elastic"] = "fixed"


class Config(Section):
    """The whole file. ``drafters: []`` serves the target alone; without the key the default pool is used."""

    model: ModelConfig = ModelConfig()
    target: TargetConfig = TargetConfig()
    drafters: tuple[DrafterConfig, ...] = Field(default=DEFAULT_DRAFTERS, max_length=64)
    memory: MemoryConfig = MemoryConfig()
    router: RouterConfig = RouterConfig()
    planner: PlannerConfig = PlannerConfig()
    slo: SloConfig = SloConfig()
    transport: TransportConfig = TransportConfig()
    api: ApiConfig = ApiConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    cluster: ClusterConfig = ClusterConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    scaling: ScalingConfig = ScalingConfig()

    def proposers_of(self, name: str) -> tuple[DrafterConfig, ...]:
        """Drafters that may draft for another in its process, smallest first: those before it in the chain or the file."""
        by_name = {drafter.name: drafter for drafter in self.drafters}
        policy = self.router.policy
        if not by_name[name].options.traits.can_verify:
            return ()
        if policy.chain:
            return tuple(by_name[one] for one in policy.chain[:-1]) if policy.chain[-1] == name else ()
        if policy.parameters.get("max_levels", 0) < 3:
            return ()
        before = self.drafters[: self.drafters.index(by_name[name])]
        return tuple(drafter for drafter in before if not drafter.is_colocated)

    def _check_chain(self, chain: tuple[str, ...]) -> None:
        """Of a fixed policy."""
        by_name = {drafter.name: drafter for drafter in self.drafters}
        if unknown := [name for name in chain if name not in by_name]:
            known = ", ".join(by_name) or "there are none"
            raise ValueError(f"router.policy.chain: must name drafters ({known}), got {unknown[0]!r}")
        if len(chain) > 3 or len(set(chain)) < len(chain):
            raise ValueError(f"router.policy.chain: must name at most three drafters, each once, got {list(chain)}")
        for name in chain[1:]:
            if not by_name[name].options.traits.can_verify:
                kind = by_name[name].options.kind
                raise ValueError(f"router.policy.chain: {name} must be of kind model or layers to verify drafts, got {kind}")
        for name in chain[:-1]:
            if by_name[name].is_colocated:
                raise ValueError(f"router.policy.chain: {name} runs in the target's process, not beside {chain[-1]}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [drafter.name for drafter in self.drafters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"drafters: names must differ, {', '.join(twice)} is used more than once")
        if taken := sorted(FREE_DRAFTERS.intersection(names)):
            raise ValueError(f"drafters: {taken[0]!r} is the name of a drafter that each target has")
        hosted = [part for drafter in self.drafters for part in parts_of(drafter.options) if isinstance(part, VllmOptions)]
        if hosted and self.target.engine == "native":
            raise ValueError("drafters: kind vllm is a proposer of vLLM: it needs target.engine vllm, got native")
        if len(hosted) > 1:
            raise ValueError(f"drafters: vLLM has one proposer, got {len(hosted)} of kind vllm")
        for i, module in enumerate(self.target.lora_modules):
            module.check(f"target.lora_modules[{i}]", self.model.public_names)
        if self.api.lora_folder is not None and not self.target.num_adapters:
            raise ValueError("api.lora_folder: needs target.lora_modules, or enable_lora in target.vllm, got neither")
        if self.target.partition == "on" and not any(drafter.is_colocated for drafter in self.drafters):
            raise ValueError("target.partition: must be auto or off without a drafter in the target's process, got 'on'")
        if self.router.policy.chain is not None:
            self._check_chain(self.router.policy.chain)
        if self.scaling.policy != "none":
            self.scaling_objectives()
            if not (self.target.scales or any(drafter.scales for drafter in self.drafters)):
                raise ValueError("scaling.policy: needs max_replicas of the target or of a drafter, else nothing can scale")
        return self

    def scaling_objectives(self) -> tuple[float, float]:
        """TTFT and TPOT in milliseconds by which replicas are decided. Raises ValueError without these objectives."""
        one = self.slo.classes[self.slo.default] if self.slo.default is not None else None
        if one is None or one.ttft_ms is None or one.tpot_ms is None:
            raise ValueError("scaling.policy: needs slo.default with ttft_ms and tpot_ms, which the replicas shall meet")
        return one.ttft_ms, one.tpot_ms


def load(path: str | Path) -> Config:
    """Reads a file. Raises ``cluster.strict_yaml.ConfigError`` with each problem's line, key, value and remedy."""
    return strict_yaml.read(Path(path), Config)


def show(config: Config) -> str:
    """The whole configuration as YAML, with defaults; `load` reads it."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
