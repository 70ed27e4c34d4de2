"""Placement of processes: configuration and inventory in, placement groups for Ray out. Pure.

One group per target replica and one per drafter, so that each can be moved and lost separately; one per replica of drafters
whose replicas come and go.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.config import Config, DrafterConfig, Resources
from cluster.errors import OutriderError
from cluster.resolve import Inventory, Node

EPSILON = 1e-6  # Ray counts in ten-thousandths; tolerates smaller rounding errors


class Strategy(StrEnum):
    """Ray's placement strategies, by Ray's names."""

    STRICT_PACK = "STRICT_PACK"
    PACK = "PACK"
    SPREAD = "SPREAD"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one process on a node that has room for them."""

    process: str  # "target-0/1" is rank 1 of the first target replica, "drafter-ngram/0" the first replica of ngram
    cpus: float
    gpus: float
    node: str  # the plan's choice
    node_labels: Mapping[str, str] = field(default_factory=dict)
    gpu: int | None = None  # first GPU of the node, as Ray would choose


@dataclass(frozen=True, slots=True)
class Group:
    """A placement group: bundle i holds process i."""

    name: str
    strategy: Strategy
    bundles: tuple[Bundle, ...]


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """All groups in the order of their creation, the hardest to place first."""

    groups: tuple[Group, ...]

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)


class PlacementError(OutriderError):
    """The machines have no room; says what is missing."""


TARGET_PREFIX = "target-"  # begins the names of targets


def target_name(replica: int) -> str:
    """Group of a target replica. Its processes are named group/rank."""
    return f"{TARGET_PREFIX}{replica}"


def drafter_name(name: str) -> str:
    """Group of a drafter, or of one replica of it. Its processes are named group/replica."""
    return f"drafter-{name}"


def target_group(config: Config, name: str) -> Group:
    """Of a target that joins while others serve. Ray chooses its node, which holds all of its ranks."""
    num_processes, resources = _target_processes(config)
    return Group(name, Strategy.STRICT_PACK, tuple(_anywhere(f"{name}/{i}", resources) for i in range(num_processes)))


def drafter_group(config: DrafterConfig, name: str) -> Group:
    """Of a replica of a drafter that joins while others serve."""
    return Group(name, Strategy.PACK, (_anywhere(f"{name}/0", config.resources),))


def _anywhere(process: str, resources: Resources) -> Bundle:
    return Bundle(process, _number(resources.cpus), _number(resources.gpus), "", resources.node_labels)


def _target_processes(config: Config) -> tuple[int, Resources]:
    """How many bundles a replica of the target has, and the resources of one."""
    target = config.target
    if target.engine == "vllm":
        return 1, _times(target.resources, target.tensor_parallel)
    return target.tensor_parallel, target.resources


def place(config: Config, inventory: Inventory) -> PlacementPlan:
    """Places a resolved configuration; raises PlacementError if something does not fit.

    The ranks of a target replica share a node if one is large enough (STRICT_PACK), otherwise as few nodes as possible
    (PACK). vLLM's are children of one process, which one bundle holds. Each drafter process goes to the node with the fewest
    drafters, on GPUs that no target uses.
    """
    free = [_Free(node) for node in inventory.nodes]
    names = map(target_name, range(config.target.replicas))
    num_processes, resources = _target_processes(config)
    groups = [_place_target(name, num_processes, resources, free) for name in names]
    for drafter in sorted(config.drafters, key=lambda d: -_number(d.resources.gpus)):
        if drafter.is_colocated:
            continue  # in the target's process
        name = drafter_name(drafter.name)
        bundles = tuple(_place_drafter(f"{name}/{i}", drafter.resources, free) for i in range(drafter.replicas))
        if drafter.scales:
            groups += [Group(f"{name}/{i}" if i else name, Strategy.PACK, (bundle,)) for i, bundle in enumerate(bundles)]
            continue
        groups.append(Group(name, Strategy.SPREAD if len(bundles) > 1 else Strategy.PACK, bundles))
    return PlacementPlan(tuple(groups))


class _Free:
    """Free resources of a node. GPUs are counted singly: halves of two GPUs hold no whole process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.cpus = node.num_cpus
        self.gpus = [1.0] * int(node.num_gpus)
        self.num_drafters = 0

    def room(self, resources: Resources, wanted: int) -> int:
        """How many such processes fit, at most ``wanted``."""
        if not resources.node_labels.items() <= self.node.labels.items():
            return 0
        cpus, gpus = _number(resources.cpus), _number(resources.gpus)
        rooms = [wanted]
        if cpus > 0:
            rooms.append(int((self.cpus + EPSILON) / cpus))
        if gpus >= 1:
            rooms.append(int(sum(one > 1 - EPSILON for one in self.gpus) / gpus))
        elif gpus > 0:
            rooms.append(sum(int((one + EPSILON) / gpus) for one in self.gpus))
        return max(0, min(rooms))

    def take(self, process: str, resources: Resources) -> Bundle:
        """As Ray does, fills a shared GPU before it breaks into a whole one."""
        cpus, gpus = _number(resources.cpus), _number(resources.gpus)
        self.cpus -= cpus
        chosen = None
        if gpus >= 1:
            whole = [i for i, one in enumerate(self.gpus) if one > 1 - EPSILON][: int(gpus)]
            chosen = whole[0]
            for i in whole:
                self.gpus[i] = 0.0
        elif gpus > 0:
            chosen = min((i for i, one in enumerate(self.gpus) if one > gpus - EPSILON), key=lambda i: self.gpus[i])
            self.gpus[chosen] -= gpus
        return Bundle(process, cpus, gpus, self.node.name, resources.node_labels, chosen)


def _place_target(name: str, num_ranks: int, resources: Resources, free: list[_Free]) -> Group:
    rooms = {node.node.name: node.room(resources, num_ranks) for node in free}
    whole = [node for node in free if rooms[node.node.name] == num_ranks]
    if whole:
        # Best fit by GPUs, then by idle CPUs, so that large gaps remain for large groups.
        chosen = min(whole, key=lambda node: (sum(node.gpus), -node.cpus))
        return Group(name, Strategy.STRICT_PACK, tuple(chosen.take(f"{name}/{i}", resources) for i in range(num_ranks)))
    if sum(rooms.values()) < num_ranks:
        raise _misfit(name, num_ranks, resources, free)
    bundles: list[Bundle] = []
    for node in sorted(free, key=lambda node: -rooms[node.node.name]):
        while len(bundles) < num_ranks and node.room(resources, 1):
            bundles.append(node.take(f"{name}/{len(bundles)}", resources))
    return Group(name, Strategy.PACK, tuple(bundles))


def _place_drafter(process: str, resources: Resources, free: list[_Free]) -> Bundle:
    fitting = [node for node in free if node.room(resources, 1)]
    if not fitting:
        raise _misfit(process, 1, resources, free)
    # Drafters without a GPU avoid nodes whose CPUs GPU processes will need.
    gpus = _number(resources.gpus)
    chosen = min(fitting, key=lambda node: (node.num_drafters, -sum(node.gpus) if gpus else 0.0, -node.cpus))
    chosen.num_drafters += 1
    return chosen.take(process, resources)


def _misfit(process: str, num_processes: int, resources: Resources, free: Iterable[_Free]) -> PlacementError:
    cpus, gpus = _number(resources.cpus), _number(resources.gpus)
    nodes = [node for node in free if resources.node_labels.items() <= node.node.labels.items()]
    each = f"{num_processes} times " if num_processes > 1 else ""
    where = f" on nodes labelled {dict(resources.node_labels)}" if resources.node_labels else ""
    if not nodes:
        return PlacementError(f"{process} cannot be placed: no node is labelled {dict(resources.node_labels)}")
    lacks = {
        "CPUs": num_processes * cpus - sum(node.cpus for node in nodes),
        "GPUs": num_processes * gpus - sum(sum(node.gpus) for node in nodes),
    }
    missing = " and ".join(f"{lack:g} {unit} are missing" for unit, lack in lacks.items() if lack > EPSILON)
    reason = missing or "what is free lies scattered, no node has enough of it in one piece"
    left = ", ".join(f"{node.node.name} {node.cpus:g} CPUs and {sum(node.gpus):g} GPUs" for node in nodes)
    return PlacementError(
        f"{process} cannot be placed: it needs {each}{cpus:g} CPUs and {gpus:g} GPUs{where}, free are {left}; {reason}. "
        f"Ask for less (replicas, tensor_parallel, resources), or add nodes"
    )


def _times(resources: Resources, num: int) -> Resources:
    return resources.model_copy(update={"cpus": num * _number(resources.cpus), "gpus": num * _number(resources.gpus)})


def _number(value: float | str) -> float:
    if isinstance(value, str):
        raise ValueError("place() needs a configuration without 'auto': call cluster.resolve.resolve first")
    return value
