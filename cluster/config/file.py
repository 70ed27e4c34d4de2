"""The whole file: the other sections, cross-checks, reading and printing."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import Field, model_validator

from cluster import strict_yaml
from cluster.config.api import ApiConfig, SloConfig
from cluster.config.drafters import DEFAULT_DRAFTERS, DrafterConfig, VllmOptions, parts_of
from cluster.config.rules import PlannerConfig, RouterConfig
from cluster.config.section import (
    Auto,
    Count,
    Fraction,
    Milliseconds,
    Name,
    Seconds,
    Section,
    former,
)
from cluster.config.target import TargetConfig
from cluster.errors import InvalidField
from cluster.model_name import public_name
from cluster.types import FREE_DRAFTERS


class ModelConfig(Section):
    """The served model."""

    # An embedded model (`outrider models`), a folder, a GGUF file, or of a Hugging Face hub ORG/MODEL[@REVISION],
    # ORG/MODEL:Q4_K_M or ORG/MODEL/FILE.gguf.
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


class MemoryConfig(Section):
    """Memory for drafters outside of the targets' processes. None: the machine's, less the targets' and a reserve."""

    cpu_gb: Annotated[float, Field(gt=0, le=65536)] | None = None  # per machine, for drafters on CPUs
    gpu_gb: Annotated[float, Field(gt=0, le=4096)] | None = None  # per GPU of drafters
    min_residence_s: Seconds = 20  # minimum time that a drafter stays loaded


UNIX = "unix"  # as the host of links: unix sockets
NODE = "node"  # the address by which Ray knows the machine


class TransportConfig(Section):
    """Links between drafters, gateways and targets: unix sockets on one machine, gRPC between machines."""

    # gRPC's listening address. node: the machine's own in Ray; auto: unix sockets on one machine, else node.
    host: str = "auto"
    removed = former(kind="it follows from host")

    @property
    def kind(self) -> Literal["unix", "grpc"]:
        """Of a resolved configuration."""
        return "unix" if self.host == UNIX else "grpc"


class ObservabilityConfig(Section):
    """Traces and logs of the API's processes."""

    # Base URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318. None: no traces.
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s?#@]+(/[^\s?#@]*)?$", max_length=1024)] | None = None
    sampled_share: Fraction = 1.0  # of calls whose caller sends no decision in traceparent
    log_format: Literal["text", "json"] = "text"  # json: with ids of requests, and a line for each request
    audit_log_file: Path | None = None  # one JSON line for each call, without prompts and answers


class StateConfig(Section):
    """Where the cluster keeps its state."""

    folder: Path = Path("~/.local/state/outrider")  # without Redis
    # Of a Redis, such as redis://127.0.0.1:6379/0, for clusters that must survive the loss of the head. None: the folder.
    url: str | None = None
    password_file: Path | None = None  # of Redis: keeps the secret out of this file
    removed = former("deadline_s", kind="it follows from url: for Redis set url, such as redis://127.0.0.1:6379/0")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.url is None:
            if self.password_file is not None:
                raise ValueError("password_file is Redis's: set url, or leave it out")
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"url must start with redis://, rediss:// or unix://, got {parts.scheme!r}")
        if parts.scheme != "unix" and (parts.hostname is None or parts.port == 0):  # raises ValueError for no number
            raise ValueError("url must name a host, and its port unless that is 6379")
        if parts.password is not None:
            raise ValueError("url must not hold a password: put it into a file and name that in password_file")
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
    start_timeout_s: Seconds = 1800  # until the first successful health check
    quarantine_restarts: Count = 5  # restarts within a minute after which a drafter is left out for two
    removed = former(
        "health_period_ms", "restart_backoff_ms", "max_restart_backoff_ms", "quarantine_window_s", "quarantine_s"
    )


class ScalingConfig(Section):
    """Replicas between ``min_replicas`` and ``max_replicas`` of the target and of each drafter."""

    policy: Literal["none", "outrider"] = "none"  # outrider: the numbers follow the load, by the objectives of slo.default
    target_start_s: Seconds = 60  # of a target, from the decision to its first request, with a machine's if that starts too
    # fixed: the machines are paid anyway, so that drafters use what is idle and give it up to targets. elastic: machines
    # come and go with the replicas, as under KubeRay's autoscaler.
    hardware: Literal["fixed", "elastic"] = "fixed"
    removed = former("drain_s", "attainment")


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


_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def with_fields(
    base: Config, fields: Mapping[str, Any], settings: Sequence[tuple[str, Any]] = (), source: str = "the command line"
) -> Config:
    """``fields``, nested, replace those of ``base``, and ``settings``, by paths such as ``drafters[0].capacity``, both.

    Raises ``cluster.strict_yaml.ConfigError``, as for a file; InvalidField: a path through what is no section or list.
    """
    data = _merged(given(base), fields)
    for path, value in settings:
        _set(data, path, value)
    return strict_yaml.check(data, Config, source)


def given(config: Config) -> dict[str, Any]:
    """What a file would hold: fields that were set, nested."""
    return config.model_dump(mode="json", exclude_unset=True)


def differing(config: Config) -> dict[str, Any]:
    """What a file must hold: fields that differ from the defaults, nested."""
    return _difference(given(config), Config().model_dump(mode="json"))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: value for name, value in over.items() if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
    }
    return {**base, **over, **{name: _merged(base[name], value) for name, value in both.items()}}


def _difference(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in data.items():
        usual = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(usual, Mapping) and value.get("kind") == usual.get("kind"):
            if inner := _difference(value, usual):
                found[name] = {"kind": value["kind"], **inner} if "kind" in value else inner
        elif value != usual:
            found[name] = value
    return found


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    steps: list[str | int] = [int(index) if index else name for name, index in _STEP.findall(path)]
    at: Any = data
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step, int):
            if not isinstance(at, list) or step >= len(at):
                raise InvalidField("--set", path, f"[{step}] is in no list of the file or the flags: name the whole list")
        elif not isinstance(at, dict):
            raise InvalidField("--set", path, f"{step} is behind a value that is no section")
        elif following is not None and not isinstance(at.get(step), dict | list):
            at[step] = {}
        if following is None:
            at[step] = value
        else:
            at = at[step]
