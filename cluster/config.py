"""The one configuration file: what it may say, and its defaults.

The defaults are a laptop's: SmolLM2-135M-Instruct and drafters that need no training, all on one machine; `outrider` puts
trained ones among them where they come with the model (`drafters.shipped`). Every section is frozen. "auto" is resolved
once, by `cluster.resolve.resolve`, into a new Config that holds no "auto" any more.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster import strict_yaml

Auto = Literal["auto"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]
DrafterDtype = Literal["int8", "bfloat16", "float32"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=4096)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]

# Of a drafter that nobody configured otherwise.
DEFAULT_CAPACITY = 64
DEFAULT_DRAFT_LEN = 8


class Section(BaseModel):
    """A part of the file: immutable, strict, and without keys that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """The served model."""

    name: str = Field(default="smollm2-135m", min_length=1)  # of an embedded model (`outrider models`), or a folder
    max_model_len: Count = 2048  # prompt and output together; at most the model's own


class Resources(Section):
    """What one process takes. Ray reserves cpus and gpus; a fraction of a GPU shares it."""

    cpus: Share | Auto = "auto"
    gpus: Share | Auto = "auto"
    threads: Count | Auto = "auto"  # of matrix products on a CPU
    node_labels: Mapping[str, str] = {}  # only nodes that carry all of these Ray labels

    @model_validator(mode="after")
    def _whole_or_shared(self) -> Self:
        if self.gpus != "auto" and self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus must be a whole number, or a fraction below 1 to share one, got {self.gpus}")
        return self


class TargetConfig(Section):
    """The engine that verifies, and how many there are of it."""

    engine: Literal["native"] = "native"
    dtype: Dtype = "bfloat16"
    device: Device = "auto"
    replicas: Count = 1
    tensor_parallel: Count = 1  # ranks of one replica
    block_len: Literal[16, 32, 64] = 32  # tokens of a KV cache block
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.5  # of one rank
    max_num_sequences: Count = 64  # running at once in one replica
    max_pass_tokens: Count = 512  # rows of one packed pass
    prefill_chunk_len: Count = 256  # rows that one prompt may take of a pass
    resources: Resources = Resources()  # of one rank

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
        return self


class NgramOptions(Section):
    """Prompt lookup: what followed the last tokens when they stood in this request before."""

    kind: Literal["ngram"] = "ngram"
    max_match_len: Count = 4
    min_match_len: Count = 2

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match_len > self.max_match_len:
            raise ValueError(f"min_match_len ({self.min_match_len}) must be at most max_match_len ({self.max_match_len})")
        return self


class SuffixOptions(Section):
    """What followed the longest known suffix in this request, or in recent outputs of others."""

    kind: Literal["suffix"] = "suffix"
    max_match_len: Count = 16
    max_shared_tokens: Count = 65_536  # of other requests' outputs that are remembered, at most 450 bytes each: 29 MB


class ModelOptions(Section):
    """A causal language model with the target's vocabulary."""

    kind: Literal["model"] = "model"
    model: str = Field(min_length=1)  # as in the section model
    num_layers: Count | None = None  # only its first layers; None: all
    dtype: Dtype = "bfloat16"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.25


class LayersOptions(Section):
    """A few layers of the target, trained to go on as it does, with a head over the tokens that it really says.

    A folder of `outrider train`: config.json, and model.safetensors with the layers, the final norm and the ids of the
    tokens that the head knows. Embedding and head are the target's own rows, read from the target's folder.

    ``dtype`` int8: on a CPU, products of int8 weights with activations of 16 bits, which read half of the bytes and add
    about 0.7% of noise; elsewhere it is bfloat16. It does not depend on how the folder stores them.
    """

    kind: Literal["layers"] = "layers"
    path: str = Field(min_length=1)  # the folder, or the name of a shipped drafter
    target: str = Field(default="auto", min_length=1)  # its model, as in the section model; auto: the served one
    dtype: DrafterDtype = "int8"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.125
    # Drafting stops when the whole draft is less likely than this to be right: two layers with a head of 16 thousand tokens
    # cost 0.13 one-row steps of SmolLM2-135M a token, in which it decodes about 0.25 tokens by itself.
    min_survival: Annotated[float, Field(ge=0, lt=1)] = 0.25


class DSparkOptions(Section):
    """A block drafter on the target's own hidden states (DSpark): it runs in the target's process, on its device.

    A folder of `outrider train`, or a released DeepSpec checkpoint. ``dtype`` as of ``LayersOptions``.
    """

    kind: Literal["dspark"] = "dspark"
    path: str = Field(min_length=1)  # the folder, or the name of a shipped drafter
    dtype: DrafterDtype = "int8"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.125
    # A draft ends before a token that is less likely than this to be accepted: its step costs about as much of the
    # target's as it may bring.
    min_survival: Fraction = 0.02


class TableOptions(Section):
    """What the target tends to say after the last few tokens: counted from its outputs, and learned while it serves."""

    kind: Literal["table"] = "table"
    path: str | None = None  # of a counted table or its folder, or the name of a shipped one; None: only what is learned
    max_learned: Annotated[int, Field(ge=0, le=2**31 - 1)] = 50_000  # contexts, about 400 bytes each
    min_confidence: Fraction = 0.1  # a draft ends before a token less probable than this


class ChainOptions(Section):
    """Two drafters as one: the verifier checks what the proposer drafts, before it leaves."""

    kind: Literal["chain"] = "chain"
    proposer: "DrafterOptions"
    verifier: Annotated[ModelOptions | LayersOptions, Field(discriminator="kind")]


class CascadeOptions(Section):
    """Of several drafters the one that promises most, per request and round; the dear ones only when it pays to ask them.

    Lookups are asked every time, go on where another stops, and are scored by what came true whether they were used or
    not. What asking a model is worth is learned over all requests and for each.
    """

    kind: Literal["cascade"] = "cascade"
    members: Annotated[tuple["DrafterOptions", ...], Field(min_length=1, max_length=16)]  # cheapest first
    # Of one draft of each member, in one-row steps of the target, until the cascade has measured it; one that costs 0 is
    # always asked. None: 0 for lookups, 0.2 for dspark, 0.35 for layers, 1 for other models.
    costs: tuple[Annotated[float, Field(ge=0, le=100)], ...] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.costs is not None and len(self.costs) != len(self.members):
            raise ValueError(
                f"costs must hold one number for each of the {len(self.members)} members, got {len(self.costs)}"
            )
        if self.costs is not None and list(self.costs) != sorted(self.costs):
            raise ValueError(f"costs must ascend: the cheapest member comes first, got {list(self.costs)}")
        return self


DrafterOptions = Annotated[
    NgramOptions
    | SuffixOptions
    | TableOptions
    | ModelOptions
    | LayersOptions
    | DSparkOptions
    | ChainOptions
    | CascadeOptions,
    Field(discriminator="kind"),
]
ChainOptions.model_rebuild()
CascadeOptions.model_rebuild()


def has_model(options: DrafterOptions) -> bool:
    """Whether such a drafter multiplies matrices."""
    if isinstance(options, CascadeOptions):
        return any(has_model(member) for member in options.members)
    return isinstance(options, ModelOptions | LayersOptions | DSparkOptions | ChainOptions)


def can_verify(options: DrafterOptions) -> bool:
    """Whether such a drafter says in one pass what it would draft behind each token of another's draft."""
    return isinstance(options, ModelOptions | LayersOptions)


def parts_of(options: DrafterOptions) -> Iterator[DrafterOptions]:
    """A drafter and all that it is made of."""
    yield options
    if isinstance(options, CascadeOptions):
        for member in options.members:
            yield from parts_of(member)
    if isinstance(options, ChainOptions):
        yield from parts_of(options.proposer)
        yield options.verifier


class DrafterConfig(Section):
    """One member of the pool."""

    name: Name
    options: DrafterOptions
    capacity: Count = DEFAULT_CAPACITY  # requests that one replica follows at once
    max_draft_len: Annotated[int, Field(ge=1, le=64)] = DEFAULT_DRAFT_LEN  # tokens of one proposal
    ahead_len: Annotated[int, Field(ge=0, le=64)] = 0  # tokens drafted on top of a proposal that is not verified yet
    # Most of its time that goes into keeping in step with requests that others draft for, so that it can take them up at
    # once, and telling the router what it would have drafted for them; 0: none.
    spare_share: Fraction = 0.1
    replicas: Count = 1
    device: Device = "auto"
    # When it is in memory: from the start on, if there is room, until others are wanted more; not before it is wanted; or
    # from the start on, for ever.
    load: Literal["start", "lazy", "pinned"] = "start"
    resources: Resources = Resources()

    @property
    def has_model(self) -> bool:
        """Whether it multiplies matrices: worth a GPU, and threads."""
        return has_model(self.options)

    @property
    def is_companion(self) -> bool:
        """Whether it reads the target's hidden states, and so runs in the process of each target replica."""
        return any(isinstance(part, DSparkOptions) for part in parts_of(self.options))

    @model_validator(mode="after")
    def _device_fits(self) -> Self:
        if self.device == "cuda" and not self.has_model:
            raise ValueError(f"device must be cpu or auto for a drafter of kind {self.options.kind}, got 'cuda'")
        if (self.device == "cpu" or not self.has_model) and self.resources.gpus not in ("auto", 0):
            raise ValueError(f"resources.gpus must be 0 for a drafter on a CPU, got {self.resources.gpus}")
        if self.is_companion and self.load == "lazy":
            raise ValueError("load must not be lazy for a drafter in the target's process: it is made with the target")
        if self.is_companion and self.replicas != 1:
            raise ValueError(
                f"replicas must be 1 for a drafter that runs in the target's process (kind dspark, or one with such a "
                f"member), got {self.replicas}: each target replica has its own"
            )
        return self


class MemoryConfig(Section):
    """What drafters may take, those in the targets' processes apart. Who finds no room waits until others give way.

    None: what the machine has, less what targets there take and a reserve.
    """

    cpu_gb: Annotated[float, Field(gt=0, le=65536)] | None = None  # of each machine, by drafters on CPUs
    gpu_gb: Annotated[float, Field(gt=0, le=4096)] | None = None  # of each GPU that drafters have
    min_residence_s: Seconds = 20  # that a loaded drafter stays at least


class FixedPolicy(Section):
    """Always the same chain, or without one the first drafter of the list that has room."""

    kind: Literal["fixed"] = "fixed"
    # Drafters, nearest to the target last: each verifies what the one before it proposes, in the process of the last. []:
    # the target alone.
    chain: tuple[Name, ...] | None = None


class GreedyLengthPolicy(Section):
    """SPIN's baseline: the shorter a request, the smaller its drafter."""

    kind: Literal["greedy-length"] = "greedy-length"


class EpsilonGreedyPolicy(Section):
    """SPIN's baseline: with probability epsilon any drafter, else the one with the best estimated goodput."""

    kind: Literal["epsilon-greedy"] = "epsilon-greedy"
    epsilon: Fraction = 0.05  # per request and slot
    hysteresis: Fraction = 0.1  # relative gain under which a request stays where it is
    prior_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh the pool's mean
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class LbssPolicy(Section):
    """SPIN's algorithms 1 and 2: explores by chunks of slots, then exploits for twice as long as the last time."""

    kind: Literal["lbss"] = "lbss"
    exploration_slots: Count = 16  # alpha: slots of each exploration
    chunk_slots: Count = 2  # beta: slots that a request stays where it was drawn to
    longest_exploitation: Count | None = None  # slots; None: twice as many with every epoch, for ever, as in the paper
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    @model_validator(mode="after")
    def _whole_chunks(self) -> Self:
        if self.exploration_slots % self.chunk_slots:
            raise ValueError(
                f"exploration_slots ({self.exploration_slots}) must be a multiple of chunk_slots ({self.chunk_slots})"
            )
        return self


class HedgePolicy(Section):
    """Full information: estimates for every request and drafter, from what was drafted and what would have been."""

    kind: Literal["hedge"] = "hedge"
    learning_rate: Annotated[float, Field(gt=0, le=1000)] = 1.0  # of the exponential weights, per token and round
    hysteresis: Fraction = 0.05  # relative gain under which a request stays where it is
    exploration: Fraction = 0.01  # of requests, per slot, that try a drafter of which they have seen next to nothing
    payback_s: Seconds = 5  # within which a switch must have gained what it costs
    request_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh its cluster's
    cluster_rounds: Annotated[float, Field(gt=0, le=100_000)] = 50.0  # of a cluster's before they outweigh the drafter's
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    num_clusters: Annotated[int, Field(ge=1, le=64)] = 16  # of like prompts
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class ChainPolicy(Section):
    """SpecRouter: for each request the chain of models with the least expected time per token.

    The drafters of the file stand from small to large. In the process of each that can verify, all before it are made, too.
    """

    kind: Literal["chain"] = "chain"
    max_levels: Annotated[int, Field(ge=2, le=4)] = 4  # models of a chain, the target included
    hysteresis: Fraction = 0.1  # share of the time per token under which a request stays where it is
    time_weight: Annotated[float, Field(gt=0, le=1)] = 0.1  # of the newest measured pass times (SpecRouter's alpha)
    calm_slots: Count = 40  # without an error or want of memory, after which a chain may be a level longer again
    request_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh its cluster's
    cluster_rounds: Annotated[float, Field(gt=0, le=100_000)] = 50.0  # of a cluster's before they outweigh the drafter's
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    num_clusters: Annotated[int, Field(ge=1, le=64)] = 16  # of like prompts


PolicyConfig = Annotated[
    FixedPolicy | GreedyLengthPolicy | EpsilonGreedyPolicy | LbssPolicy | HedgePolicy | ChainPolicy,
    Field(discriminator="kind"),
]


class CollapseConfig(Section):
    """When what a drafter drafts counts as worthless, and how it comes back."""

    remaining: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of what is usual for it to be right: the collapse to find
    quarantine_s: Seconds = 60  # until it is tried again, twice as long each time that it fails
    max_quarantine_s: Seconds = 600
    trial_places: Count = 2  # requests that may be with it then

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_quarantine_s < self.quarantine_s:
            raise ValueError(
                f"max_quarantine_s ({self.max_quarantine_s}) must be at least quarantine_s ({self.quarantine_s})"
            )
        return self


class RouterConfig(Section):
    """Who rides ahead of whom, and how often that is decided."""

    policy: PolicyConfig = HedgePolicy()
    slot_ms: Annotated[float, Field(ge=10, le=10_000)] = 250
    collapse: CollapseConfig = CollapseConfig()


class PlannerConfig(Section):
    """What a pass of the target verifies."""

    verify: Literal["goodput", "all"] = "goodput"  # goodput: as many drafts as raise the tokens per second of the pass
    max_hold_ms: Annotated[float, Field(ge=0, le=10_000)] = 50  # bound on the wait for a proposal; 0: never waits


class TransportConfig(Section):
    """How drafters, gateways and targets talk: unix sockets on one machine, gRPC between machines."""

    kind: Literal["auto", "unix", "grpc"] = "auto"
    host: str = "auto"  # that gRPC listens at; auto: loopback on one machine, else every interface


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


def default_pool(table: TableOptions | None = None, *models: DrafterOptions) -> tuple[DrafterConfig, ...]:
    """The drafters of a file that names none: per request and round the best of lookups, a table and ``models``.

    Beside it two lookups in processes of their own, for what they copy is drafted while the target computes, and requests
    have somewhere to go when the cascade is gone. More members would cost memory and processor time for what the cascade
    asks anyway.
    """
    cascade = CascadeOptions(members=(NgramOptions(), SuffixOptions(), table or TableOptions(), *models))
    return (
        DrafterConfig(name="cascade", options=cascade),
        DrafterConfig(name="ngram", options=NgramOptions()),
        DrafterConfig(name="suffix", options=SuffixOptions()),
    )


DEFAULT_DRAFTERS = default_pool()


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

    @property
    def max_draft_len(self) -> int:
        """Longest proposal that any drafter may send, 0 without drafters."""
        return max((drafter.max_draft_len for drafter in self.drafters), default=0)

    def proposers_of(self, name: str) -> tuple[DrafterConfig, ...]:
        """Who may ride ahead of a drafter in its own process, smallest first: those before it in a fixed chain, or in the
        file where the policy makes chains."""
        by_name = {drafter.name: drafter for drafter in self.drafters}
        policy = self.router.policy
        if not can_verify(by_name[name].options):
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
            if not can_verify(by_name[name].options):
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
