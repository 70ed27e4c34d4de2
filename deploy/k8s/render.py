"""Values of the Helm chart for a configuration file: pods for the targets, and for each kind of drafter."""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.config import Config, DrafterConfig, Resources, Section, SuffixOptions, TlsConfig, TransportConfig
from cluster.errors import InvalidField
from cluster.model_name import GGUF
from cluster.placement import PlacementError, place
from cluster.resolve import LOOKUP_CPUS, MODEL_ON_CPU_CPUS, WITH_GPU_CPUS, Inventory, Node
from engine.dtypes import BFLOAT16_BYTES
from engine.models.gguf_file import GgufFile
from engine.models.prepare import CATALOGUE

CHART = Path(__file__).resolve().parents[2] / "k8s" / "chart"
POOL = "outrider/pool"  # the label of worker groups, of Kubernetes and of Ray
SECRETS = "/etc/outrider-secrets"
_TLS = TlsConfig(cert_file=Path(SECRETS, "tls.crt"), key_file=Path(SECRETS, "tls.key"), ca_file=Path(SECRETS, "ca.crt"))
GPU = "nvidia.com/gpu"
SYSTEM_CPUS, SYSTEM_GB = 0.5, 2.0  # of a pod, for Ray's own processes
PROCESSES_END_S = 50  # of a pod, after its requests have drained
PROCESS_GB, LOOKUP_GB = 2.0, 0.5  # of a process with torch, of one without
EMBEDDED_GB = 1.0  # an embedded model's weights, in fp32
SHARED_TOKEN_BYTES = 450
OBJECT_STORE_BYTES = 100 * 2**20  # of each pod; only routing tables and status pass through it


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the file does not say.

    Args:
        cpus: of each rank of a target on CPUs, where the file says "auto".
        secret: name of the Secret with API keys, passwords and tokens; with ``-tls`` that of the one with the certificate.
        models_claim: name of the volume claim that is mounted at /models.
        model_gb: GB of weights by the name of a model, for those whose folder is not on this machine.
    """

    cpus: float = 4
    secret: str = "outrider"
    models_claim: str = ""
    image: str | None = None
    model_gb: Mapping[str, float] = field(default_factory=dict)


def values_for(config: Config, options: Options = Options()) -> dict[str, Any]:
    """Values for `k8s/chart`. Raises InvalidField: the file asks for what the chart cannot give."""
    config = for_cluster(config, options)
    weights_gb = _weights_gb(config, options.model_gb)
    groups = _drafter_groups(config, weights_gb)
    if "gateway" in groups:
        raise InvalidField("resources.node_labels", "gateway", f"the group of this name runs the API: use another {POOL}")
    values: dict[str, Any] = {"modelSpec": {"config": _plain(config)}, "worker": _target_group(config, weights_gb)}
    gateway: dict[str, Any] = {}
    if config.api.most > 1:  # a pod for each
        gateway |= dict.fromkeys(("replicas", "minReplicas"), config.api.replicas) | {"maxReplicas": config.api.most}
    if (grace_s := _grace_s(config)) != _grace_s(Config()):  # else as in the chart
        gateway["terminationGracePeriodSeconds"] = grace_s
    if gateway:
        groups["gateway"] = gateway
    values["additionalWorkerGroups"] = groups
    if options.models_claim:
        values["modelSpec"]["volume"] = {"claimName": options.models_claim, "mountPath": "/models"}
    if secrets := _secrets(config, options.secret):
        values["secrets"] = secrets
    if config.cluster.state.url is not None:
        values["gcsFaultTolerance"] = _on_redis(config.cluster.state.url, secrets)
        values["networkPolicy"] = {"redis": _egress_to_redis(config.cluster.state.url)}
    if options.image is not None:
        repository, colon, tag = options.image.rpartition(":")
        values["image"] = (
            {"repository": repository, "tag": tag} if colon and "/" not in tag else {"repository": options.image}
        )
    return values


def for_cluster(config: Config, options: Options = Options()) -> Config:
    """The configuration for pods: devices and resources are given, each part names its pods, paths are those of pods.

    A fleet that scales does so on elastic hardware: KubeRay's autoscaler adds and removes the pods of the worker groups.
    """
    target = config.target
    engine = "native" if target.engine == "auto" else target.engine  # whose processes the pods below are made for
    device = _device(target.device, target.resources, has_model=True)
    cpus = WITH_GPU_CPUS if device == "cuda" else options.cpus
    resources = _given(target.resources, device, cpus, "target")
    state: dict[str, Any] = {}
    if config.cluster.state.password_file is not None:
        state = {"password_file": Path(SECRETS, "redis-password")}
    elif config.cluster.state.url is None:  # of the pod, as its file system is read-only elsewhere
        state = {"folder": Path("/home/outrider/state")}
    token = config.cluster.token_file and Path(SECRETS, "link-token")
    tls = config.cluster.tls and _TLS
    keys = config.api.api_keys_file and Path(SECRETS, "api-keys")
    operators = config.api.operator_keys_file and Path(SECRETS, "operator-keys")
    return config.changed(
        target={"engine": engine, "device": device, "resources": resources},
        drafters=tuple(map(_placed, config.drafters)),
        transport=TransportConfig(),  # the nodes' addresses, whatever the file says
        scaling={} if config.scaling.policy == "none" else {"hardware": "elastic"},
        api={"host": "0.0.0.0", "port": 8000, "api_keys_file": keys, "operator_keys_file": operators},
        cluster={"ray_address": None, "token_file": token, "tls": tls, "state": state},
    )


def _plain(value: Any) -> Any:
    """A section as data, without defaults. The pool is always given, since a file without one gets that of its model."""
    if isinstance(value, Section):
        fields = {name: (getattr(value, name), field.get_default()) for name, field in type(value).model_fields.items()}
        given = {name: now for name, (now, default) in fields.items() if now != default or name in ("kind", "drafters")}
        return {name: _plain(now) for name, now in given.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return str(value) if isinstance(value, Path) else value


def _placed(drafter: DrafterConfig) -> DrafterConfig:
    if drafter.is_colocated:
        return drafter
    device = _device(drafter.device, drafter.resources, drafter.has_model)
    cpus = WITH_GPU_CPUS if device == "cuda" else MODEL_ON_CPU_CPUS if drafter.has_model else LOOKUP_CPUS
    resources = _given(drafter.resources, device, cpus, f"drafter-{drafter.options.kind}")
    return drafter.model_copy(update={"device": device, "resources": resources})


def _device(device: str, resources: Resources, has_model: bool) -> str:
    asks_for_gpu = resources.gpus not in ("auto", 0)
    return device if device != "auto" else ("cuda" if has_model and asks_for_gpu else "cpu")


def _given(asked: Resources, device: str, cpus: float, pool: str) -> Resources:
    cpus = asked.cpus if asked.cpus != "auto" else cpus
    gpus = asked.gpus if asked.gpus != "auto" else (1.0 if device == "cuda" else 0.0)
    threads = asked.threads if asked.threads != "auto" else (1 if device == "cuda" else max(1, int(cpus)))
    return Resources(cpus=cpus, gpus=gpus, threads=threads, node_labels=dict(asked.node_labels) or {POOL: pool})


def _target_group(config: Config, weights_gb: Mapping[str, float]) -> dict[str, Any]:
    """A pod holds a replica with all of its ranks, so that they share a machine."""
    target, num_ranks = config.target, config.target.tensor_parallel
    on_cpu_gb = num_ranks * target.kv_cache_bytes / 2**30 if target.device == "cpu" else 0
    processes_gb = PROCESS_GB * (num_ranks + sum(d.is_colocated for d in config.drafters))
    memory_gb = weights_gb[config.model.name] + on_cpu_gb + processes_gb
    cpus, gpus = num_ranks * _number(target.resources.cpus), math.ceil(num_ranks * _number(target.resources.gpus))
    num_pods = (target.least, target.replicas, target.most)
    group = _group(num_pods, cpus, gpus, memory_gb, target.resources.node_labels)
    return {"groupName": "target", "terminationGracePeriodSeconds": _grace_s(config)} | group


def _grace_s(config: Config) -> int:
    """Of the pods whose end ends requests: the drain, and the end of the processes."""
    return math.ceil(config.api.drain_s) + PROCESSES_END_S


def _drafter_groups(config: Config, weights_gb: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By the labels of their pods: those of the same labels share pods. Raises InvalidField."""
    groups: dict[str, dict[str, Any]] = {}
    pools: dict[tuple[tuple[str, str], ...], list[DrafterConfig]] = defaultdict(list)
    for drafter in config.drafters:
        if not drafter.is_colocated:
            pools[tuple(sorted(drafter.resources.node_labels.items()))].append(drafter)
    for labels, drafters in pools.items():
        if dict(labels) == dict(config.target.resources.node_labels):
            reason = "must not be those of the target, whose pods hold a replica each: leave them out"
            raise InvalidField("drafters.resources.node_labels", dict(labels), reason)
        num_pods, cpus, gpus = _pods(config, drafters)
        memory_gb = _memory_gb(drafters, num_pods[-1], weights_gb)
        name = "-".join(value for _, value in labels).lower().replace("_", "-").replace(".", "-")
        if name in groups:
            reason = "make the name of another group: use other values"
            raise InvalidField("drafters.resources.node_labels", dict(labels), reason)
        groups[name] = _group(num_pods, cpus, gpus, memory_gb, dict(labels))
    return groups


def _pods(config: Config, drafters: Sequence[DrafterConfig]) -> tuple[tuple[int, int, int], float, int]:
    """The fewest pods that hold them, at least, at start and at most, and the CPUs and GPUs of each."""
    num_processes = sum(d.most for d in drafters)
    total_cpus = sum(d.most * _number(d.resources.cpus) for d in drafters)
    largest = max(_number(d.resources.cpus) for d in drafters)
    gpus = math.ceil(max(_number(d.resources.gpus) for d in drafters))
    needs_nothing = {"replicas": 1, "tensor_parallel": 1, "resources": Resources(cpus=0, gpus=0)}
    alone = config.changed(target=needs_nothing)
    most = [d.most for d in drafters]
    for num_pods in range(max(most), num_processes):
        cpus = max(largest, total_cpus / num_pods)
        for size in (cpus, cpus + largest):  # with room for an uneven split
            if _fits(alone, drafters, most, num_pods, size, gpus):
                least, start = (
                    next((n for n in range(max(num), num_pods) if _fits(alone, drafters, num, n, size, gpus)), num_pods)
                    for num in ([d.least for d in drafters], [d.replicas for d in drafters])
                )
                return (least, start, num_pods), size, gpus
    return (sum(d.least for d in drafters), sum(d.replicas for d in drafters), num_processes), largest, gpus


def _fits(
    alone: Config, drafters: Sequence[DrafterConfig], num_replicas: Sequence[int], num_pods: int, cpus: float, gpus: int
) -> bool:
    """Whether so many pods of this size hold so many replicas of each drafter."""
    each = zip(drafters, num_replicas, strict=True)
    fixed = tuple(d.changed(replicas=num, min_replicas=None, max_replicas=None) for d, num in each)
    nodes = tuple(Node(str(i), cpus, gpus, drafters[0].resources.node_labels) for i in range(num_pods))
    try:
        place(alone.changed(drafters=fixed), Inventory(nodes))
    except PlacementError:
        return False
    return True


def _memory_gb(drafters: Sequence[DrafterConfig], num_pods: int, weights_gb: Mapping[str, float]) -> float:
    """Of a pod."""
    total_gb = 0.0
    for drafter in drafters:
        options, needed_gb = drafter.options, PROCESS_GB if drafter.has_model else LOOKUP_GB
        if drafter.has_model:
            needed_gb += weights_gb[_model_of(drafter)] + (
                getattr(options, "kv_cache_gb", 0.0) if drafter.device == "cpu" else 0.0
            )
        if isinstance(options, SuffixOptions):
            needed_gb += options.max_shared_tokens * SHARED_TOKEN_BYTES / 1e9
        total_gb += drafter.most * needed_gb
    return math.ceil(total_gb / num_pods)


def _weights_gb(config: Config, given: Mapping[str, float]) -> dict[str, float]:
    """By the name of each model: as given, of an embedded model, or of a folder on this machine.

    Raises InvalidField: some are none of these; names all of them.
    """
    drafters = [d for d in config.drafters if d.has_model and not d.is_colocated]
    models = dict.fromkeys([config.model.name, *map(_model_of, drafters)])
    known = {model: given[model] if model in given else _weights_on_disk_gb(model) for model in models}
    if missing := [model for model, gb in known.items() if gb is None]:
        sizes = " ".join(f"--model-gb {model}=GB" for model in missing)
        reason = f"is not on this machine, so that the memory of its pods is unknown: give the size of the weights, {sizes}"
        raise InvalidField("model.name", missing[0], reason)
    return {model: gb for model, gb in known.items() if gb is not None}


def _weights_on_disk_gb(model: str) -> float | None:
    if model in CATALOGUE:
        return EMBEDDED_GB
    path = Path(model).expanduser()
    if path.suffix == GGUF and path.is_file():
        tensors = GgufFile(path).tensors.values()
        return sum(BFLOAT16_BYTES * math.prod(tensor.shape) for tensor in tensors) / 1e9  # more than any that are as shipped
    files = list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / 1e9 if files else None


def _model_of(drafter: DrafterConfig) -> str:
    return str(getattr(drafter.options, "model", None) or getattr(drafter.options, "path", ""))


def _group(
    num_pods: tuple[int, int, int], cpus: float, gpus: int, memory_gb: float, labels: Mapping[str, str]
) -> dict[str, Any]:
    """``num_pods``: at least, at start, and at most. Labels but ``POOL`` are those of Kubernetes nodes, too.

    Raises InvalidField: a label is Ray's own, which no node of Kubernetes has.
    """
    least, start, most = num_pods
    wanted: dict[str, Any] = {"cpu": str(math.ceil(cpus + SYSTEM_CPUS))}
    wanted["memory"] = f"{math.ceil(memory_gb + SYSTEM_GB)}Gi"
    for name in labels:
        if name.startswith("ray.io/"):
            reason = "is a label that Ray gives its nodes: name one of the Kubernetes nodes, as nvidia.com/gpu.product"
            raise InvalidField("resources.node_labels", name, reason)
    if gpus:
        wanted[GPU] = str(gpus)
    group: dict[str, Any] = {
        "replicas": start,
        "minReplicas": least,
        "maxReplicas": most,
        "labels": dict(labels),
        "rayStartParams": {"object-store-memory": str(OBJECT_STORE_BYTES)},
        "resources": {"requests": wanted, "limits": dict(wanted)},
    }
    if selector := {name: value for name, value in labels.items() if name != POOL}:
        group["nodeSelector"] = selector
    if gpus:
        group["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return group


def _secrets(config: Config, name: str) -> dict[str, Any]:
    """The secrets that the file refers to."""
    state = config.cluster.state
    used = {
        "apiKeys": (config.api.api_keys_file, "api-keys"),
        "operatorKeys": (config.api.operator_keys_file, "operator-keys"),
        "redisPassword": (state.password_file, "redis-password"),
        "linkToken": (config.cluster.token_file, "link-token"),
    }
    found: dict[str, Any] = {key: {"name": name, "key": file} for key, (path, file) in used.items() if path}
    return found | ({"tls": {"name": f"{name}-tls"}} if config.cluster.tls else {})


def _on_redis(url: str, secrets: dict[str, Any]) -> dict[str, Any]:
    """Fault tolerance of Ray's GCS on the Redis of the state store."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        raise InvalidField("cluster.state.url", url, "must be redis:// or rediss://: pods share no sockets")
    address = f"{parts.scheme}://" if parts.scheme == "rediss" else ""
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    found: dict[str, Any] = {"enabled": True, "redisAddress": f"{address}{host}:{parts.port or 6379}"}
    return found | ({"redisPassword": secrets["redisPassword"]} if "redisPassword" in secrets else {})


def _egress_to_redis(url: str) -> dict[str, Any]:
    """Of the network policy: the port of the URL and, unless the host is a name of the pods' own namespace, the peers."""
    parts = urlsplit(url)
    host, found = parts.hostname or "", {"port": parts.port or 6379}
    try:
        address = ip_address(host)
    except ValueError:
        _, *suffix = host.split(".")
    else:
        return found | {"to": [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}]}
    if not suffix:
        return found
    if suffix[1:2] == ["svc"]:
        namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": suffix[0]}}}
        return found | {"to": [namespace | {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "redis"}}}]}
    reason = f"pods may connect to any address at port {found['port']}: set networkPolicy.redis.to"
    print(f"outrider: a network policy cannot name the host {host}, so that {reason}", file=sys.stderr)
    return found | {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}


def manifest(values: dict[str, Any], release: str) -> str:
    """All manifests, as `helm template` renders them. Raises InvalidField: the chart or `helm-python-sdk` is not there."""
    if not (CHART / "Chart.yaml").is_file():
        raise InvalidField("--manifest", str(CHART), "needs a checkout of the repository, which has the chart")
    try:
        import helm_python as helm
    except ImportError as error:
        reason = "needs the package helm-python-sdk; or write values, and run helm template on them"
        raise InvalidField("--manifest", True, reason) from error
    try:
        with helm.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            rendered = chart.render(values, name=release)
    except helm.HelmError as error:
        raise InvalidField("--manifest", release, str(error)) from error
    texts = (text.strip() for name, text in sorted(rendered.items()) if name.endswith(".yaml"))
    return "\n---\n".join(text.removeprefix("---").strip() for text in texts if text) + "\n"


def _number(value: float | str) -> float:
    assert not isinstance(value, str), "for_cluster replaces auto"
    return value
