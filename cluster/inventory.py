"""Resources of the machines, as plain data for `cluster.resolve` and `cluster.placement`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
