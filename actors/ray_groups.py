"""Ray's placement groups: how one is made from the plan, and given back."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import ray
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from actors.processes import ProcessEnded
from cluster.placement import TARGET_PREFIX, Group, drafter_name
from router.assignment import member_name

logger = logging.getLogger(__name__)

GROUP_DEADLINE_S = 60.0
HEAD = "node:__internal_head__"  # a resource of the head alone
# A bundle must not be empty; this is Ray's smallest unit.
SMALLEST_SHARE = 0.0001


def make_group(group: Group, detached: bool) -> PlacementGroup:
    """Asks for it without waiting. It ends with its maker unless it is detached."""
    labels = [dict(bundle.node_labels) for bundle in group.bundles]
    asked = [{"CPU": bundle.cpus, "GPU": bundle.gpus} for bundle in group.bundles]
    shares = [{key: share for key, share in one.items() if share} or {"CPU": SMALLEST_SHARE} for one in asked]
    selector = labels if any(labels) else None
    lifetime = "detached" if detached else None
    made: PlacementGroup = placement_group(shares, str(group.strategy), group.name, lifetime, bundle_label_selector=selector)
    return made


class Groups:
    """The groups of a deployment by name: those made at its launch, and those of replicas that join later."""

    def __init__(self, launched: Mapping[str, PlacementGroup], detached: bool) -> None:
        self._groups = dict(launched)
        self._detached = detached

    def __getitem__(self, name: str) -> PlacementGroup:
        return self._groups[name]

    async def ensure(self, name: str, make: Callable[[], Group]) -> None:
        """Finds the group or makes it. Raises ProcessEnded: there is no room within GROUP_DEADLINE_S."""
        group = self._groups.get(name)
        if group is not None and _exists(group):
            return
        try:
            group = get_placement_group(name)  # of an earlier supervisor
        except ValueError:
            group = make_group(make(), self._detached)
        if not await asyncio.to_thread(group.wait, GROUP_DEADLINE_S):
            remove_placement_group(group)
            raise ProcessEnded(f"the cluster had no room for {name} within {GROUP_DEADLINE_S:g} s; see `ray status`")
        self._groups[name] = group

    def is_placed(self, name: str) -> bool:
        group = self._groups.get(name)
        return group is not None and bool(placement_group_table(group).get("state") == "CREATED")

    def give_back(self, name: str) -> None:
        """Ends what runs in it, too. It may have no place yet, or be of an earlier supervisor."""
        group = self._groups.pop(name, None)
        try:
            remove_placement_group(group or get_placement_group(name))
        except ValueError:
            return  # there is none


def _exists(group: PlacementGroup) -> bool:
    """False after it was given back, which an earlier supervisor may have done."""
    return bool(placement_group_table(group).get("state", "REMOVED") != "REMOVED")


def named_groups() -> list[str]:
    """In this namespace, also those that Ray has not placed yet."""
    found = []
    for group in placement_group_table().values():  # of all namespaces
        with suppress(ValueError):
            if group["state"] != "REMOVED" and group["name"]:
                get_placement_group(group["name"])
                found.append(str(group["name"]))
    return found


def members_on(nodes: Collection[str]) -> frozenset[str]:
    """Targets and drafters whose places are on these nodes, by their names."""
    found = set()
    for group in placement_group_table().values() if nodes else ():
        for bundle, node in group["bundles_to_node_id"].items():
            if node in nodes and group["state"] != "REMOVED":
                name = group["name"]
                found.add(
                    name if name.startswith(TARGET_PREFIX) else member_name(name.removeprefix(drafter_name("")), bundle)
                )
    return frozenset(found)


def named_actors() -> list[str]:
    """In this namespace."""
    return [str(name) for name in ray.util.list_named_actors()]
