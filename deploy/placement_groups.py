"""Ray's nodes and placement groups, as the inventory and the plan of `cluster.placement`."""

import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_groups import GROUP_DEADLINE_S, HEAD, make_group
from cluster.placement import PlacementPlan
from cluster.resolve import Inventory, Node
from deploy.local_ray import LaunchError
from profiler.hardware import num_cores

_logger = logging.getLogger(__name__)

QUERY_DEADLINE_S = 20.0


def read_inventory(nodes: list[dict[str, Any]]) -> Inventory:
    """The inventory of `ray.nodes()`, the head first."""
    alive = sorted((n for n in nodes if n["Alive"]), key=lambda n: HEAD not in n["Resources"])
    return Inventory(tuple(map(_node, alive)))


def _node(node: dict[str, Any]) -> Node:
    has, labels = node["Resources"], dict(node.get("Labels") or {})
    memory_bytes = int(has["memory"]) if "memory" in has else None
    return Node(node["NodeID"], has.get("CPU", 0.0), has.get("GPU", 0.0), labels, memory_bytes=memory_bytes)


def with_cores(inventory: Inventory) -> Inventory:
    """Adds each node's physical cores; unknown for a node that does not answer."""
    if len(inventory.nodes) == 1 and inventory.nodes[0].name == ray.get_runtime_context().get_node_id():
        return Inventory((replace(inventory.nodes[0], num_cores=num_cores()),))
    found = _query_nodes(_count_cores, inventory.nodes)
    return Inventory(tuple(replace(node, num_cores=found.get(node.name)) for node in inventory.nodes))


def with_gpu_memory(inventory: Inventory) -> Inventory:
    """Adds the GPU memory of each node; unknown for a node that does not answer."""
    found = _query_nodes(_gpu_bytes, [node for node in inventory.nodes if node.num_gpus])
    return Inventory(tuple(replace(node, gpu_bytes=found.get(node.name)) for node in inventory.nodes))


def _query_nodes(question: Any, nodes: Sequence[Node]) -> dict[str, int | None]:
    """A remote function's results by node. Nodes that fail or answer too late are logged and left out."""
    places = {node.name: NodeAffinitySchedulingStrategy(node.name, soft=False) for node in nodes}
    pending = {question.options(scheduling_strategy=place).remote(): name for name, place in places.items()}
    answered, late = ray.wait(list(pending), num_returns=len(pending), timeout=QUERY_DEADLINE_S) if pending else ([], [])
    for answer in late:
        _logger.warning("node %s did not describe its hardware within %g s", pending[answer], QUERY_DEADLINE_S)
    found: dict[str, int | None] = {}
    for answer in answered:
        try:
            found[pending[answer]] = ray.get(answer)
        except RayError as error:  # the node died, or cannot import this package
            _logger.warning("node %s could not describe its hardware: %s", pending[answer], error)
    return found


@ray.remote(num_cpus=0, num_gpus=0, max_retries=0)
def _count_cores() -> int:
    return num_cores()


@ray.remote(num_cpus=0, num_gpus=0, max_retries=0)
def _gpu_bytes() -> int | None:
    """Bytes of the smallest GPU of this node that Ray may give to processes; None if it is unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # of Ray on this node
    chosen = ["-i", visible] if visible and not visible.startswith("MIG") else []
    command = ["nvidia-smi", *chosen, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return smallest_gpu(done.stdout)


def smallest_gpu(output: str) -> int | None:
    """Bytes of the smallest GPU in nvidia-smi's output, MiB per line; invalid lines are ignored."""
    sizes = [int(line) for line in output.split() if line.isdigit()]
    return min(sizes) * 2**20 if sizes else None


def make_groups(plan: PlacementPlan, *, detached: bool = False) -> dict[str, PlacementGroup]:
    """Creates a plan's placement groups, which end with this driver unless they are detached. Raises LaunchError, and
    removes all, if one is late."""
    groups: dict[str, PlacementGroup] = {}
    end_s = time.monotonic() + GROUP_DEADLINE_S
    for group in plan.groups:
        groups[group.name] = made = make_group(group, detached)
        if not made.wait(max(1.0, end_s - time.monotonic())):
            for one in groups.values():
                remove_placement_group(one)
            needed = " + ".join(f"{b.cpus:g} CPUs and {b.gpus:g} GPUs" for b in group.bundles)
            raise LaunchError(
                f"Ray could not place {group.name} ({needed}) within {GROUP_DEADLINE_S:g} s: something else uses the "
                "cluster's resources; see `ray status`"
            )
    return groups


def as_made(plan: PlacementPlan, groups: Mapping[str, PlacementGroup]) -> PlacementPlan:
    """The plan with the nodes that Ray chose."""
    made = []
    for group in plan.groups:
        nodes = placement_group_table(groups[group.name])["bundles_to_node_id"]
        bundles = tuple(replace(bundle, node=nodes.get(i, bundle.node)) for i, bundle in enumerate(group.bundles))
        made.append(replace(group, bundles=bundles))
    return PlacementPlan(tuple(made))
