"""Ray's part: which class becomes an actor where, and how one is asked, found again and killed."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.drafter import DrafterActor
from actors.memory_budget import MemoryBudget
from actors.processes import Directory, Process, ProcessEnded
from actors.router import RouterActor
from actors.supervisor import Supervisor
from actors.target import TargetActor
from cluster.client import ClusterStatus
from cluster.config import Config, DrafterConfig
from cluster.errors import OutriderError
from cluster.placement import drafter_name, target_name
from cluster.types import ModelInfo, RoutingTable
from router.assignment import member_name
from router.slot import SlotReport

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
ROUTER = "router"
KILL_DEADLINE_S = 10.0
# Threads of an actor, by what they answer. Questions that wait have threads of their own: one whose caller has died keeps
# its thread until it is answered, and must not block those that tell whether the process is well.
NUM_THREADS = 6
WAITING = {"start": 1, "wait_end": 4}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the processes are made of. ``config`` is resolved; ``groups`` go by the names of `cluster.placement`."""

    config: Config
    groups: Mapping[str, PlacementGroup]
    folder: str  # for the sockets of the data plane
    token: str
    budget: MemoryBudget | None = None

    def target_address(self, name: str) -> str:
        transport = self.config.transport
        return f"unix://{self.folder}/{name}.sock" if transport.kind == "unix" else f"grpc://{transport.host}:0"


class RayProcess:
    """`actors.supervisor.Process` over an actor handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        # Always asked for: it fails the moment that Ray learns of the actor's death.
        self._end = self._remote("wait_end")

    async def ended(self) -> str:
        try:
            while (end := await self._end) is None:
                self._end = self._remote("wait_end")
            return str(end)
        except RayActorError as error:
            return why(error)
        except RayTaskError as error:
            return f"{type(error.cause).__name__}: {error.cause}"

    async def unread_s(self) -> float:
        return float(await self.call("unread_s"))

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await self._remote(method, *args)
        except RayActorError as error:
            raise ProcessEnded(why(error)) from error
        except RayTaskError as error:
            # Whatever was raised there: that process is at fault, and it is replaced.
            cause = error.cause
            reason = str(cause) if isinstance(cause, OutriderError) else f"{type(cause).__name__}: {cause}"
            raise ProcessEnded(reason) from error

    def _remote(self, method: str, *args: Any) -> Any:
        ask = getattr(self._handle, method)
        return (ask.options(concurrency_group=method) if method in WAITING else ask).remote(*args)

    async def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)
        try:
            await asyncio.wait_for(self.ended(), KILL_DEADLINE_S)
        except TimeoutError:
            logger.error("an actor is not dead %.0f s after it was killed", KILL_DEADLINE_S)


def why(error: RayActorError) -> str:
    """One line of what Ray tells over many: the cause of death, where it names one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("The actor died because", "The actor is dead because"))]
    return [*lines, *causes][-1] if lines else type(error).__name__


class RaySpawner:
    """`actors.supervisor.Spawner`: actors by name in the deployment's namespace, placed by its groups.

    They are detached, so that they outlive a supervisor that dies and are found again by the next one; they end with their
    placement groups, which belong to the launcher. The router has a place in the group of the first target that has nodes.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def target(self, name: str) -> Process:
        d = self._deployment
        # Rank 0 of the group; the engine itself spreads over the bundles of further ranks.
        options = self._placed(name, 0)
        args = (d.config, name, d.target_address(name), d.token, ray.util.get_node_ip_address)
        return self._found_or_made(TargetActor, name, options, *args)

    async def drafter(self, name: str, config: DrafterConfig, model: ModelInfo, addresses: Sequence[str]) -> Process:
        d = self._deployment
        replica = next(i for i in range(config.replicas) if member_name(config.name, i) == name)
        options = self._placed(drafter_name(config.name), replica)
        args = (config, name, model, addresses, d.token, d.config.proposers_of(config.name))
        return self._found_or_made(DrafterActor, drafter_name(name), options, *args)

    async def end_drafter(self, name: str) -> None:
        try:
            handle = ray.get_actor(drafter_name(name))
        except ValueError:
            return
        await RayProcess(handle).kill()

    async def router(self) -> Process:
        from actors.chain_scheduler import ModelChainScheduler
        from router.estimates.drift import DriftDetector
        from router.policies import build_policy, build_pool, keeps_in_step
        from router.slot import Router

        config = self._deployment.config
        watch = DriftDetector(config.router.collapse, config.router.slot_ms / 1e3)
        policy, pool = build_policy(config.router.policy), build_pool(config)
        router = Router(policy, pool, watch, keeps_in_step(config.router.policy))
        kind = ModelChainScheduler if config.router.policy.kind == "chain" else RouterActor
        targets = RayTargets([f"target-{replica}" for replica in range(config.target.replicas)])
        options = self._placed(self._router_group(), 0) | {"num_cpus": 0, "num_gpus": 0}
        return self._found_or_made(kind, ROUTER, options, config, router, targets, True)

    def _router_group(self) -> str:
        """The first target's group whose bundles have nodes; target 0's if none has, since a group may be placed again."""
        names = [target_name(replica) for replica in range(self._deployment.config.target.replicas)]
        for name in names:
            if placement_group_table(self._deployment.groups[name])["state"] == "CREATED":
                return name
        return names[0]

    def _placed(self, group: str, bundle: int) -> dict[str, Any]:
        placement = self._deployment.groups[group]
        resources = placement.bundle_specs[bundle]
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
        }

    def _found_or_made(self, kind: type, name: str, options: dict[str, Any], *args: Any) -> Process:
        try:
            return RayProcess(ray.get_actor(name))
        except ValueError:  # there is none of that name
            return RayProcess(_actor(kind, name=name, lifetime="detached", **options).remote(*args))


def _actor(kind: type, **options: Any) -> Any:
    """Ray never restarts these by itself: the supervisor does, by one policy."""
    options_of_class: dict[str, Any] = {"concurrency_groups": WAITING}  # which Ray's stubs do not know
    remote: Any = ray.remote(**options_of_class)(kind)
    return remote.options(max_restarts=0, max_concurrency=NUM_THREADS, **options)


class RayTargets:
    """`actors.router.Targets` over actors by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._handles: dict[str, Any] = {}

    def reports(self, deadline_s: float) -> list[SlotReport]:
        self._find()
        asked = {handle.slot_report.remote(): name for name, handle in self._handles.items()}
        if not asked:
            return []
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=deadline_s)
        reports = []
        for answer in answered:
            try:
                report: SlotReport | None = ray.get(answer)
            except RayActorError:
                del self._handles[asked[answer]]  # the supervisor starts another, which is found by its name
                continue
            except RayTaskError as error:
                logger.warning("%s could not report: %s: %s", asked[answer], type(error.cause).__name__, error.cause)
                continue
            if report is not None:
                reports.append(report)
        return reports

    def publish(self, table: RoutingTable) -> None:
        for handle in self._handles.values():
            handle.publish_table.remote(table)

    def _find(self) -> None:
        for name in self._names:
            if name not in self._handles:
                try:
                    self._handles[name] = ray.get_actor(name)
                except ValueError:
                    continue  # not started yet, or between two lives


class PoolSupervisor:
    """The Supervisor as an asyncio actor. Ray restarts it; it then finds its members by name and goes on."""

    def __init__(self, deployment: Deployment) -> None:
        self._supervisor = Supervisor(deployment.config, RaySpawner(deployment), deployment.budget)
        self._started = False

    async def start(self) -> Directory:
        """Starts everything, once, and returns as `Supervisor.ready`."""
        self._begin()
        return await self._supervisor.ready()

    async def directory(self, known: Directory) -> Directory:
        self._begin()
        return await self._supervisor.directory(known)

    async def reasons(self) -> dict[str, str]:
        return self._supervisor.reasons()

    async def status(self) -> ClusterStatus:
        self._begin()
        return await self._supervisor.status()

    async def pids(self) -> dict[str, int]:
        return self._supervisor.pids() | {SUPERVISOR: os.getpid()}

    async def set_draining(self, name: str, draining: bool) -> None:
        await self._supervisor.set_draining(name, draining)

    async def drain(self, deadline_s: float) -> bool:
        return await self._supervisor.drain(deadline_s)

    async def stop(self) -> None:
        await self._supervisor.stop()

    def _begin(self) -> None:
        """Tasks need the actor's event loop, which a constructor does not run in."""
        if not self._started:
            self._started = True
            self._supervisor.start()


def start_supervisor(deployment: Deployment) -> Any:
    """A handle of the deployment's supervisor, which stays on the node of its launcher: only with that node is it lost."""
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(PoolSupervisor)
        .options(
            name=SUPERVISOR,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(deployment)
    )
