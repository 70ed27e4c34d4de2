"""The seam between Ray's nodes and placement groups, and `cluster.placement`, which knows no Ray."""

import time
from collections.abc import Mapping
from typing import Any

from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from cluster.inventory import Inventory, Node
from cluster.placement import Group, PlacementPlan
from deploy.local_ray import LaunchError

GROUP_DEADLINE_S = 60.0
# A bundle must ask for something; this is Ray's smallest unit.
SMALLEST_SHARE = 0.0001


def read_inventory(nodes: list[dict[str, Any]]) -> Inventory:
    """What `ray.nodes()` tells, the head first."""
    alive = sorted((n for n in nodes if n["Alive"]), key=lambda n: "node:__internal_head__" not in n["Resources"])
    return Inventory(
        tuple(
            Node(n["NodeID"], n["Resources"].get("CPU", 0.0), n["Resources"].get("GPU", 0.0), dict(n.get("Labels") or {}))
            for n in alive
        )
    )


def make_groups(plan: PlacementPlan) -> dict[str, PlacementGroup]:
    """Ray's groups of a plan, by its names. They end with this driver.

    Raises:
        LaunchError: a group could not be placed within the deadline; those made are removed.
    """
    groups: dict[str, PlacementGroup] = {}
    end_s = time.monotonic() + GROUP_DEADLINE_S
    for group in plan.groups:
        groups[group.name] = made = _make(group)
        if not made.wait(max(1.0, end_s - time.monotonic())):
            for one in groups.values():
                remove_placement_group(one)
            wanted = " + ".join(f"{b.cpus:g} CPUs and {b.gpus:g} GPUs" for b in group.bundles)
            raise LaunchError(
                f"Ray found no place for {group.name} ({wanted}) within {GROUP_DEADLINE_S:g} s: something else uses the "
                "cluster's resources; see `ray status`"
            )
    return groups


def _make(group: Group) -> PlacementGroup:
    labels: list[Mapping[str, str]] = [bundle.node_labels for bundle in group.bundles]
    return placement_group(
        [
            {key: share for key, share in (("CPU", b.cpus), ("GPU", b.gpus)) if share} or {"CPU": SMALLEST_SHARE}
            for b in group.bundles
        ],
        strategy=str(group.strategy),
        name=group.name,
        bundle_label_selector=[dict(one) for one in labels] if any(labels) else None,
    )
