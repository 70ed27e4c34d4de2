"""The whole file: all other sections, what must hold between them, and how it is read and shown."""

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import Field, field_validator, model_validator

from cluster import strict_yaml
from cluster.config.drafters import DEFAULT_DRAFTERS, DrafterConfig
from cluster.config.router import ChainPolicy, FixedPolicy, RouterConfig
from cluster.config.section import Count, Device, Dtype, Milliseconds, Name, Resources, Seconds, Section


class ModelConfig(Section):
    """The served model."""

    name: str = Field(default="smollm2-135m", min_length=1)  # of an embedded model (`outrider models`), or a folder
    max_model_len: Count = 2048  # prompt and output together; at most the model's own


class TargetConfig(Section):
    """The engine that verifies, and how many there are of it."""

    engine: Literal["native"] = "native"
    dtype: Dtype = "auto"
    device: Device = "auto"
    replicas: Count = 1
    tensor_parallel: Count = 1  # ranks of one replica
    block_len: Literal[16, 32, 64] = 32  # tokens of a KV cache block
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.5  # of one rank
    max_num_sequences: Count = 64  # running at once in one replica
    max_pass_tokens: Count = 512  # rows of one packed pass
    prefill_chunk_len: Count = 256  # rows that one prompt may take of a pass
    resources: Resources = Resources()  # of one rank

    @field_validator("tensor_parallel")
    @classmethod
    def _one_rank(cls, num_ranks: int) -> int:
        if num_ranks > 1:
            raise ValueError(
                f"must be 1, got {num_ranks}: the native engine runs each replica on one GPU; set target.replicas instead"
            )
        return num_ranks

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.prefill_chunk_len > self.max_pass_tokens:
            raise ValueError(
                f"prefill_chunk_len ({self.prefill_chunk_len}) must be at most max_pass_tokens ({self.max_pass_tokens})"
            )
        if self.max_num_sequences > self.max_pass_tokens:
            raise ValueError(
                f"max_num_sequences ({self.max_num_sequences}) must be at most max_pass_tokens ({self.max_pass_tokens}): "
                "every running sequence computes a token in each pass"
            )
        if self.device == "cpu" and self.resources.gpus not in ("auto", 0):
            raise ValueError(f"resources.gpus must be 0 on device cpu, got {self.resources.gpus}")
        if self.device == "cuda" and self.resources.gpus == 0:
            raise ValueError("resources.gpus must be greater than 0 on device cuda, got 0: leave it out for one GPU")
        return self


class MemoryConfig(Section):
    """What drafters may take, those in the targets' processes apart. Who finds no room waits until others give way.

    None: what the machine has, less what targets there take and a reserve.
    """

    cpu_gb: Annotated[float, Field(gt=0, le=65536)] | None = None  # of each machine, by drafters on CPUs
    gpu_gb: Annotated[float, Field(gt=0, le=4096)] | None = None  # of each GPU that drafters have
    min_residence_s: Seconds = 20  # that a loaded drafter stays at least


class PlannerConfig(Section):
    """What a pass of the target verifies."""

    verify: Literal["goodput", "all"] = "goodput"  # goodput: as many drafts as raise the tokens per second of the pass
    max_hold_ms: Annotated[float, Field(ge=0, le=10_000)] = 50  # bound on the wait for a proposal; 0: never waits


class TransportConfig(Section):
    """How drafters, gateways and targets talk: unix sockets on one machine, gRPC between machines."""

    kind: Literal["auto", "unix", "grpc"] = "auto"
    host: str = "auto"  # that gRPC listens at; auto: loopback on one machine, else every interface


Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$", max_length=256)]


class ApiConfig(Section):
    """The HTTP server, and what it refuses."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    api_keys_file: Path | None = None  # one key a line; None: no key is asked for
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = 4 * 2**20
    max_concurrent_requests: Count = 256  # sequences in flight; further calls wait for their turn
    max_queued_requests: Count = 256  # calls that wait; more are refused with 429
    max_choices: Annotated[int, Field(ge=1, le=128)] = 16  # n of one call
    request_deadline_s: Seconds = 600
    unknown_fields: Literal["warn", "refuse"] = "warn"  # of a request's body; warn: ignored, and named in a header
    cors_origins: tuple[Origin, ...] = ()  # web pages that browsers let read answers, such as https://chat.example; "*": all


class FileStateConfig(Section):
    """State in small files of one folder."""

    kind: Literal["file"] = "file"
    folder: Path = Path("~/.local/state/outrider")


class RedisStateConfig(Section):
    """State in Redis, for clusters whose head may be lost."""

    kind: Literal["redis"] = "redis"
    url: str = "redis://127.0.0.1:6379/0"
    password_file: Path | None = None  # keeps the secret out of this file
    deadline_s: Seconds = 2  # of every call

    @model_validator(mode="after")
    def _usable(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"url must start with redis://, rediss:// or unix://, got {parts.scheme!r}")
        if parts.password is not None:
            raise ValueError("url must not hold a password: put it into a file and name that in password_file")
        return self


StateConfig = Annotated[FileStateConfig | RedisStateConfig, Field(discriminator="kind")]


class ClusterConfig(Section):
    """The Ray cluster."""

    namespace: Name = "outrider"  # deployments of different namespaces share a cluster without meeting
    ray_address: str | None = None  # of a running cluster; None: one is started on this machine
    token_file: Path | None = None  # shared secret of all links; None: a random one at every launch
    state: StateConfig = FileStateConfig()


class SupervisionConfig(Section):
    """When a process counts as dead, and how it comes back."""

    health_period_ms: Milliseconds = 500
    health_timeout_ms: Milliseconds = 3000  # without an answer: hung, killed and restarted
    start_timeout_s: Seconds = 300  # from start to the first sign of health
    restart_backoff_ms: Milliseconds = 250  # before the second restart, doubled at every further one
    max_restart_backoff_ms: Milliseconds = 30_000
    quarantine_restarts: Count = 5  # restarts within the window that put a drafter into quarantine
    quarantine_window_s: Seconds = 60
    quarantine_s: Seconds = 120  # until it is tried again

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_restart_backoff_ms < self.restart_backoff_ms:
            raise ValueError(
                f"max_restart_backoff_ms ({self.max_restart_backoff_ms}) must be at least "
                f"restart_backoff_ms ({self.restart_backoff_ms})"
            )
        return self


class Config(Section):
    """The whole file. ``drafters: []`` serves the target alone; a file without the key gets the default pool."""

    model: ModelConfig = ModelConfig()
    target: TargetConfig = TargetConfig()
    drafters: tuple[DrafterConfig, ...] = Field(default=DEFAULT_DRAFTERS, max_length=64)
    memory: MemoryConfig = MemoryConfig()
    router: RouterConfig = RouterConfig()
    planner: PlannerConfig = PlannerConfig()
    transport: TransportConfig = TransportConfig()
    api: ApiConfig = ApiConfig()
    cluster: ClusterConfig = ClusterConfig()
    supervision: SupervisionConfig = SupervisionConfig()

    def proposers_of(self, name: str) -> tuple[DrafterConfig, ...]:
        """Who may ride ahead of a drafter in its own process, smallest first: those before it in a fixed chain, or in the
        file where the policy makes chains."""
        by_name = {drafter.name: drafter for drafter in self.drafters}
        policy = self.router.policy
        if not by_name[name].options.traits.can_verify:
            return ()
        if isinstance(policy, FixedPolicy):
            return tuple(by_name[one] for one in policy.chain[:-1]) if policy.chain and policy.chain[-1] == name else ()
        if not isinstance(policy, ChainPolicy) or policy.max_levels < 3:
            return ()
        before = self.drafters[: self.drafters.index(by_name[name])]
        return tuple(drafter for drafter in before if not drafter.is_companion)

    def _check_chain(self, chain: tuple[str, ...]) -> None:
        """Of a fixed policy."""
        by_name = {drafter.name: drafter for drafter in self.drafters}
        if len(chain) > 3 or len(set(chain)) < len(chain):
            raise ValueError(f"router.policy.chain: must name at most three drafters, each once, got {list(chain)}")
        for name in chain[1:]:
            if not by_name[name].options.traits.can_verify:
                raise ValueError(
                    f"router.policy.chain: {name} must be of kind model or layers to verify what another proposes, got "
                    f"{by_name[name].options.kind}"
                )
        for name in chain[:-1]:
            if by_name[name].is_companion:
                raise ValueError(
                    f"router.policy.chain: {name} reads the target's hidden states, so that it cannot run beside {chain[-1]}"
                )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [drafter.name for drafter in self.drafters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"drafters: names must differ, {', '.join(twice)} stands there more than once")
        policy = self.router.policy
        if isinstance(policy, FixedPolicy) and policy.chain is not None:
            unknown = [name for name in policy.chain if name not in names]
            if unknown:
                raise ValueError(
                    f"router.policy.chain: must name drafters ({', '.join(names) or 'there are none'}), got {unknown[0]!r}"
                )
            self._check_chain(policy.chain)
        return self


def load(path: str | Path) -> Config:
    """The configuration in a file.

    Raises:
        cluster.strict_yaml.ConfigError: names the file, and of each problem line, key, value and what to do.
    """
    return strict_yaml.read(Path(path), Config)


def show(config: Config) -> str:
    """The whole configuration as YAML, defaults written out; `load` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
