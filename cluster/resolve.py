"""Replaces every "auto" in a configuration, except dtypes, by a value for the machines at hand, which an
``Inventory`` lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.config import (
    CascadeOptions,
    Config,
    DrafterConfig,
    DrafterOptions,
    HiddenStateOptions,
    LayersOptions,
    ModelOptions,
    Resources,
    TargetConfig,
)
from cluster.config.file import NODE, UNIX
from cluster.errors import InvalidField

# CPUs of a process with "auto". Lookup drafters are idle nearly all the time.
LOOKUP_CPUS = 0.1
MODEL_ON_CPU_CPUS = 0.5
WITH_GPU_CPUS = 1.0
API_CPUS = 0.2  # of a replica of the API
CONTROL_CPUS = 0.3  # left to the router and the supervisor
MIN_TARGET_CPUS = 0.5


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. None: unknown."""

    name: str
    num_cpus: float  # logical
    num_gpus: float = 0
    labels: Mapping[str, str] = field(default_factory=dict)  # Ray's node labels
    memory_bytes: int | None = None  # available to processes
    gpu_bytes: int | None = None  # of the smallest GPU
    num_cores: int | None = None  # physical, that processes may use

    @property
    def num_threads(self) -> float:
        """For matrix products, which gain nothing from a second thread per core."""
        return self.num_cpus if self.num_cores is None else min(self.num_cpus, self.num_cores)


@dataclass(frozen=True, slots=True)
class Inventory:
    """All usable nodes, the head first."""

    nodes: tuple[Node, ...]

    def matching(self, labels: Mapping[str, str]) -> "Inventory":
        """The nodes with all of these labels."""
        return Inventory(tuple(node for node in self.nodes if labels.items() <= node.labels.items()))

    @property
    def num_cpus(self) -> float:
        return sum(node.num_cpus for node in self.nodes)

    @property
    def num_threads(self) -> float:
        return sum(node.num_threads for node in self.nodes)

    @property
    def num_gpus(self) -> float:
        return sum(node.num_gpus for node in self.nodes)


def resolve(config: Config, inventory: Inventory, max_threads: int | None = None, *, uses_gpus: bool = True) -> Config:
    """Idempotent. Replicas count as many as there may be.

    Args:
        max_threads: of the target with "auto"; None: as many as there are.
        uses_gpus: whether "auto" may be a GPU; False where this environment cannot use one.

    The target and the drafters in its process use GPUs if there are enough for all ranks, vLLM's if there is one. Other
    drafters with a model use the remaining GPUs, one each, or equal shares if there are fewer GPUs than drafters, else CPUs.

    Raises:
        InvalidField: unix sockets between several machines.
    """
    target = config.target
    nodes = inventory.matching(target.resources.node_labels)
    num_ranks = target.most * target.tensor_parallel
    num_gpus = num_ranks * (1.0 if target.resources.gpus == "auto" else target.resources.gpus)
    # vLLM's build for GPUs computes on nothing else: placement reports what is missing.
    enough = num_gpus if target.engine == "vllm" and nodes.num_gpus else nodes.num_gpus
    on_gpu = uses_gpus and 0 < num_gpus <= enough and target.dtype != "as-shipped"
    device = target.device if target.device != "auto" else ("cuda" if on_gpu else "cpu")
    named = [d.model_copy(update={"options": _with_target(d.options, config.model.name)}) for d in config.drafters]
    own_nodes = nodes if device == "cuda" else Inventory(())
    drafters = _resolve_drafters(named, inventory, own_nodes, num_gpus, device, uses_gpus)
    one_node = len(inventory.nodes) == 1
    host = config.transport.host
    if host == "auto":
        host = UNIX if one_node and config.cluster.ray_address is None else NODE  # sockets end with their launcher
    elif host == UNIX and not one_node:
        raise InvalidField(
            "transport.host", host, f"must be auto or an address: the cluster has {len(inventory.nodes)} machines"
        )
    kept_cpus = CONTROL_CPUS + config.api.most * API_CPUS
    resources = _target_resources(target, device, drafters, nodes, kept_cpus, max_threads)
    engine = "native" if target.engine == "auto" else target.engine
    target = target.changed(engine=engine, device=device, resources=resources)
    if device == "cpu":
        target = target.changed(kv_cache_gb=target.kv_cache_bytes / 2**30)
    target = target.changed(max_pass_tokens=target.longest_pass)
    state = {"folder": config.cluster.state.folder.expanduser()}
    return config.changed(target=target, drafters=drafters, transport={"host": host}, cluster={"state": state})


def _resolve_drafters(
    drafters: Sequence[DrafterConfig],
    inventory: Inventory,
    target_nodes: Inventory,
    target_gpus: float,
    target_device: str,
    uses_gpus: bool,
) -> tuple[DrafterConfig, ...]:
    resolved = []
    for drafter in drafters:
        asked = drafter.resources
        if drafter.is_colocated:
            if target_device == "cuda" and drafter.has_model and not drafter.fits_gpu:
                raise InvalidField(
                    "drafters", drafter.name, "has a member of dtype as-shipped, which needs a target on a CPU"
                )
            nothing = {"cpus": 0.0, "gpus": 0.0, "threads": 1}  # beside the target's own
            resolved.append(drafter.changed(device=target_device, resources=nothing))
            continue
        rivals = [d for d in drafters if d.resources.node_labels == asked.node_labels]
        share = _gpu_share(rivals, inventory.matching(asked.node_labels), target_nodes, target_gpus)
        gpus = asked.gpus if asked.gpus != "auto" else share
        on_gpu = drafter.fits_gpu and (drafter.device == "cuda" or (drafter.device == "auto" and gpus > 0 and uses_gpus))
        if on_gpu and asked.gpus == "auto":
            gpus = share or 1.0  # no GPU is free: placement reports what is missing
        cpus = WITH_GPU_CPUS if on_gpu else MODEL_ON_CPU_CPUS if drafter.has_model else LOOKUP_CPUS
        resources = _filled(asked, cpus=cpus, threads=1).model_copy(update={"gpus": gpus if on_gpu else 0.0})
        resolved.append(drafter.model_copy(update={"device": "cuda" if on_gpu else "cpu", "resources": resources}))
    return tuple(resolved)


def _with_target(options: DrafterOptions, model: str) -> DrafterOptions:
    """Sets the served model's name in drafters that read its rows or its tokenizer, at any depth."""
    if isinstance(options, ModelOptions | LayersOptions | HiddenStateOptions):
        return options if options.target != "auto" else options.of_target(model)
    if isinstance(options, CascadeOptions):
        return options.model_copy(update={"members": tuple(_with_target(member, model) for member in options.members)})
    return options


def _gpu_share(sharing: Sequence[DrafterConfig], nodes: Inventory, target_nodes: Inventory, target_gpus: float) -> float:
    """Share of a GPU for each process of ``sharing`` with ``gpus: auto``; 0 if none is left."""
    common = sum(node.num_gpus for node in nodes.nodes if node in target_nodes.nodes)
    named = sum(d.most * d.resources.gpus for d in sharing if d.resources.gpus != "auto")
    num_free = int(nodes.num_gpus - min(target_gpus, common) - named)
    wanting = [d for d in sharing if d.fits_gpu and not d.is_colocated and d.device != "cpu" and d.resources.gpus == "auto"]
    num_wanting = sum(d.most for d in wanting)
    if num_free < 1 or num_wanting == 0:
        return 0.0
    sharers = -(-num_wanting // num_free)
    return 1.0 if sharers == 1 else int(10_000 / sharers) / 10_000  # Ray counts in ten-thousandths


def _target_resources(
    target: TargetConfig,
    device: str,
    drafters: Sequence[DrafterConfig],
    nodes: Inventory,
    kept_cpus: float,
    max_threads: int | None,
) -> Resources:
    num_ranks, on_gpu = target.most * target.tensor_parallel, device == "cuda"
    used = sum(d.most * d.resources.cpus for d in drafters if d.resources.cpus != "auto")
    # Ranks on CPUs share what drafters leave, up to the largest machine's.
    largest = max((node.num_cpus for node in nodes.nodes), default=1.0)
    left = min((nodes.num_cpus - used - kept_cpus) / num_ranks, largest)
    cpus = WITH_GPU_CPUS if on_gpu else max(MIN_TARGET_CPUS, int(left * 10) / 10)
    # On a laptop drafters and target mostly take turns, so the target may use every core. vLLM's server leaves one to its
    # scheduler, which here runs in the target's own thread: of two cores it would be half.
    most = max((node.num_threads for node in nodes.nodes), default=1.0)
    useful = min(nodes.num_threads / num_ranks, most, max_threads or most)
    threads = 1 if on_gpu else max(1, int(useful) - (target.engine == "vllm" and useful > 2))
    return _filled(target.resources, cpus=cpus, gpus=1.0 if on_gpu else 0.0, threads=threads)


def _filled(asked: Resources, **values: float) -> Resources:
    """With the values where "auto" stands."""
    return asked.model_copy(update={name: value for name, value in values.items() if getattr(asked, name) == "auto"})
