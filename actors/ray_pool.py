"""The supervisor's processes as Ray actors: spawning, placement, calls, lookup by name, and kill."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # which Ray's stubs do not know
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.chain_scheduler import ANSWER_S, ChainSlot, ModelChainScheduler, beside
from actors.drafter import DrafterActor
from actors.drafter_loader import MemoryBudget
from actors.health import RETRY_S
from actors.processes import Process, ProcessEnded, ProcessUnavailable
from actors.ray_groups import HEAD, Groups, members_on, named_actors, named_groups
from actors.router import RouterActor
from actors.supervisor import CHAINS, ROUTER, Supervisor
from actors.target import RankActor, RankProcesses, TargetActor
from cluster.client import MetricsExchange, ReplicaMetrics
from cluster.config import Config, DrafterConfig
from cluster.errors import InvalidField, OutriderError
from cluster.logs import log_as_configured
from cluster.placement import TARGET_PREFIX, drafter_group, drafter_name, target_group, target_name
from cluster.transport import bracketed
from cluster.types import ModelInfo, RoutingTable
from router.assignment import Chain, member_name
from router.drafter.router import SlotReport
from router.scaling.report import FleetSize

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
NODE_LABEL = "ray.io/node-id"  # which Ray sets
KILL_DEADLINE_S = 10.0
MACHINES_POLL_S, MACHINES_DEADLINE_S = 2.0, 10.0
NUM_THREADS = 6  # of an actor
# Those of its blocking methods, by concurrency group: one whose caller has died must not block health checks.
BLOCKING = {"start": 1, "wait_end": 4}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the processes are spawned from. ``config`` is resolved; ``groups``: by the names of `cluster.placement`."""

    config: Config
    groups: Mapping[str, PlacementGroup]
    folder: str  # for the sockets of the data plane
    token: str
    budget: MemoryBudget | None = None
    model_folder: str = ""
    source: str = ""  # digest of the configuration before it was resolved
    detached: bool = False  # processes and groups outlive the supervisor's owner

    def target_address(self, name: str) -> str:
        transport = self.config.transport
        return f"unix://{self.folder}/{name}.sock" if transport.kind == "unix" else f"grpc://{bracketed(transport.host)}:0"


class RayProcess:
    """`actors.processes.Process` over an actor handle."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle
        # Always pending: it fails as soon as Ray learns of the actor's death.
        self._end = self._remote("wait_end")

    async def ended(self) -> str:
        is_away = False
        while True:
            try:
                while (end := await self._end) is None:
                    self._end = self._remote("wait_end")
                return str(end)
            except ActorUnavailableError as error:
                if not is_away:
                    logger.warning("the connection to %s was lost; asking it again: %s", self.name, death_cause(error))
                is_away = True
                await asyncio.sleep(RETRY_S)
                self._end = self._remote("wait_end")
            except RayTaskError as error:
                return f"{type(error.cause).__name__}: {error.cause}"
            except RayError as error:
                return death_cause(error)

    async def stalled_s(self) -> float:
        """Asked again while the connection is lost, which is no sign that the process hangs."""
        while True:
            try:
                return float(await self.call("stalled_s"))
            except ProcessUnavailable:
                await asyncio.sleep(RETRY_S)

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await self._remote(method, *args)
        except ActorUnavailableError as error:
            raise ProcessUnavailable(death_cause(error)) from error
        except RayTaskError as error:
            cause = error.cause
            reason = str(cause) if isinstance(cause, OutriderError) else f"{type(cause).__name__}: {cause}"
            raise ProcessEnded(reason) from error
        except RayError as error:  # also of a process that was killed for memory, which is no RayActorError
            raise ProcessEnded(death_cause(error)) from error

    def _remote(self, method: str, *args: Any) -> Any:
        ask = getattr(self._handle, method)
        return (ask.options(concurrency_group=method) if method in BLOCKING else ask).remote(*args)

    async def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)
        try:
            await asyncio.wait_for(self.ended(), KILL_DEADLINE_S)
        except TimeoutError:
            logger.error("%s is still alive %.0f s after it was killed", self.name, KILL_DEADLINE_S)


def death_cause(error: RayError) -> str:
    """The line of Ray's report that gives the cause of death, else its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("The actor died because", "The actor is dead because"))]
    return [*lines, *causes][-1] if lines else type(error).__name__


class RaySpawner:
    """`actors.processes.Spawner`: named actors in the deployment's namespace and placement groups.

    They are detached: they end with their placement groups, which belong to the launcher, not with the supervisor.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._groups = Groups(deployment.groups, deployment.detached)

    async def target(self, name: str) -> Process:
        d = self._deployment
        if d.config.target.scales:
            await self._groups.ensure(name, lambda: target_group(d.config, name))
        host = ray.util.get_node_ip_address
        num_ranks = d.config.target.tensor_parallel if d.config.target.engine != "vllm" else 1
        names = [name, *(f"{name}/{rank}" for rank in range(1, num_ranks))]
        found = [process for one in names if (process := _find(one)) is not None]
        if 0 < len(found) < num_ranks:  # the ranks live and die together
            await asyncio.gather(*(process.kill() for process in found))
        args = (d.config, name, d.target_address(name), d.token, host)
        first = self._get_or_create(TargetActor, name, self._placed(name, 0), *args)
        others = [
            self._get_or_create(RankActor, names[rank], self._placed(name, rank), d.config, rank, host)
            for rank in range(1, num_ranks)
        ]
        return RankProcesses(first, others) if others else first

    async def drafter(self, name: str, config: DrafterConfig, model: ModelInfo, addresses: Sequence[str]) -> Process:
        d = self._deployment
        group, replica = drafter_name(config.name), 0
        if config.scales:
            group = drafter_name(name)
            await self._groups.ensure(group, lambda: drafter_group(config, group))
        else:
            replica = next(i for i in range(config.replicas) if member_name(config.name, i) == name)
        options = self._placed(group, replica)
        proposers = d.config.proposers_of(config.name)
        args = (config, name, model, addresses, d.token, proposers, d.config.cluster.tls, d.config.observability)
        return self._get_or_create(DrafterActor, drafter_name(name), options, *args)

    async def end(self, group: str, give_back: bool = False) -> None:
        names = [group]
        if group.startswith(TARGET_PREFIX):  # with its ranks
            names += [name for name in named_actors() if name.startswith(f"{group}/")]
        await asyncio.gather(*(process.kill() for name in names if (process := _find(name)) is not None))
        if give_back:
            self._groups.give_back(group)

    def running(self) -> dict[str, bool]:
        return dict.fromkeys(named_groups(), False) | dict.fromkeys(named_actors(), True)

    async def control(self, name: str) -> Process:
        from router.drafter.policies import build_pool, scored_by
        from router.drafter.router import SLOT_S, Router
        from router.estimates.drift import DriftDetector

        config, policy = self._deployment.config, self._deployment.config.router.policy
        options = self._placed(self._router_group(), 0) | {"num_cpus": 0, "num_gpus": 0}
        if name == CHAINS:
            return self._get_or_create(ModelChainScheduler, CHAINS, options, config, True)
        make_policy = partial(beside, RayChains())
        router = Router(make_policy(policy), build_pool(config), DriftDetector(SLOT_S), scored_by(policy))
        targets = RayTargets([target_name(replica) for replica in range(config.target.replicas)])
        return self._get_or_create(RouterActor, ROUTER, options, config, router, targets, True, SLOT_S, make_policy)

    def _router_group(self) -> str:
        """The first target's group that is placed on nodes; target 0's if none is, since Ray may reschedule it."""
        names = [target_name(replica) for replica in range(self._deployment.config.target.replicas)]
        return next((name for name in names if self._groups.is_placed(name)), names[0])

    def _placed(self, group: str, bundle: int) -> dict[str, Any]:
        placement = self._groups[group]
        resources = placement.bundle_specs[bundle]
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
        }

    def _get_or_create(self, kind: type, name: str, options: dict[str, Any], *args: Any) -> Process:
        return _find(name) or RayProcess(name, _actor(kind, name=name, lifetime="detached", **options).remote(*args))


def _find(name: str) -> Process | None:
    try:
        return RayProcess(name, ray.get_actor(name))
    except ValueError:  # there is no such actor
        return None


def _actor(kind: type, **options: Any) -> Any:
    """An actor class that Ray does not restart: the supervisor does."""
    options_of_class: dict[str, Any] = {"concurrency_groups": BLOCKING}  # which Ray's stubs do not know
    remote: Any = ray.remote(**options_of_class)(kind)
    return remote.options(max_restarts=0, max_concurrency=NUM_THREADS, **options)


class RayChains:
    """`actors.chain_scheduler.Chains` over the actor's name."""

    def __init__(self) -> None:
        self._under_way: Any = None

    def tell(self, slot: ChainSlot) -> None:
        if self._under_way is not None and not ray.wait([self._under_way], timeout=0)[0]:
            return
        with suppress(ValueError):  # not started yet, or being restarted
            self._under_way = ray.get_actor(CHAINS).judge.remote(slot)

    def ask(self, slot: ChainSlot) -> Mapping[str, Chain] | None:
        self.tell(slot)
        if self._under_way is None:
            return None
        try:
            decided: Mapping[str, Chain] | None = ray.get(self._under_way, timeout=ANSWER_S)
        except GetTimeoutError:  # told nothing more until it has answered
            return None
        except RayError as error:
            logger.warning("the scheduler of chains does not answer: %s", death_cause(error))
            decided = None
        self._under_way = None
        return decided


class RayTargets:
    """`actors.router.Targets` over actors by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._handles: dict[str, Any] = {}

    def reports(self, deadline_s: float) -> list[SlotReport]:
        names = self._names
        self._handles = {name: handle for name, handle in self._handles.items() if name in names}
        for name in names:
            if name not in self._handles:
                with suppress(ValueError):  # not started yet, or being restarted
                    self._handles[name] = ray.get_actor(name)
        pending = {handle.slot_report.remote(): name for name, handle in self._handles.items()}
        answered, _ = ray.wait(list(pending), num_returns=len(pending), timeout=deadline_s) if pending else ([], [])
        reports = []
        for answer in answered:
            try:
                report: SlotReport | None = ray.get(answer)
            except RayTaskError as error:
                logger.warning("%s could not report: %s: %s", pending[answer], type(error.cause).__name__, error.cause)
                continue
            except RayError:
                del self._handles[pending[answer]]  # the supervisor starts another one of that name
                continue
            if report is not None:
                reports.append(report)
        return reports

    def publish(self, table: RoutingTable) -> None:
        for handle in tuple(self._handles.values()):
            handle.publish_table.remote(table)

    def set_names(self, names: Sequence[str]) -> None:
        self._names = tuple(names)


class PoolSupervisor(Supervisor):
    """The Supervisor as an asyncio actor, which Ray restarts; it then finds the processes by name and continues."""

    def __init__(self, deployment: Deployment) -> None:
        log_as_configured(deployment.config.observability)
        super().__init__(deployment.config, RaySpawner(deployment), deployment.budget, _resources)
        self._deployment = deployment
        self._exchange = MetricsExchange()
        self._cut_off = False  # as last seen
        self._gcs: Any = None  # making one takes as long as the head is out of reach
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="asks the head")
        self._question: asyncio.Future[Any] | None = None

    def deployment(self) -> Deployment:
        return self._deployment

    def start(self) -> None:
        if not self._pool.targets:
            self._tasks.start(self._follow_machines(), "follow the machines that drain")
        super().start()

    async def is_cut_off(self) -> bool:
        """Whether the head is out of reach, silent for as long as a process may be: its loss, or a network that is cut. One
        question for all who ask: Ray's own ends when the head is back, whatever its time-out."""
        if self._gcs is None:
            return False
        reach_s = self._config.supervision.health_timeout_ms / 1e3
        if self._question is None or self._question.done():
            ask = partial(self._gcs.get_draining_nodes, timeout=reach_s)
            self._question = asyncio.get_running_loop().run_in_executor(self._asking, ask)
            self._question.add_done_callback(lambda question: question.cancelled() or question.exception())
        reached = False
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(reach_s):
                await asyncio.shield(self._question)
            reached = True
        if self._cut_off is reached:
            self._cut_off = not reached
            if self._cut_off:
                logger.warning("the head is out of reach: nobody is replaced for not answering until it is back")
        return not reached

    async def _follow_machines(self) -> None:
        """As `ray drain-node`, a pod that ends, or the autoscaler asks for it."""
        self._gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        while True:
            try:
                nodes = await asyncio.to_thread(self._gcs.get_draining_nodes, timeout=MACHINES_DEADLINE_S)
                await self.leave_machines(await asyncio.to_thread(members_on, nodes))
            except RayError as error:
                logger.debug("the GCS does not say which machines drain: %s", error)
            await asyncio.sleep(MACHINES_POLL_S)

    def scale(self, size: FleetSize) -> FleetSize:
        """As ``resize``, asked by an operator. Raises InvalidField: the numbers follow the load, or a drafter's is fixed."""
        if (policy := self._config.scaling.policy) != "none":
            raise InvalidField("scaling.policy", policy, "decides the numbers of the running deployment, unless it is none")
        known = self.fleet()[1]
        if unknown := [name for name in size.num_drafters if name not in known]:
            reason = f"must be one that has max_replicas in the running deployment: {', '.join(known) or 'there is none'}"
            raise InvalidField("drafter", unknown[0], reason)
        return self.resize(size)

    def pids(self) -> dict[str, int]:
        return super().pids() | {SUPERVISOR: os.getpid()}

    def exchange_metrics(self, own: ReplicaMetrics) -> tuple[ReplicaMetrics, ...]:
        """As `MetricsExchange.give`."""
        return self._exchange.give(own, time.monotonic())


async def _resources() -> dict[str, float]:
    resources: dict[str, float] = await asyncio.to_thread(ray.cluster_resources)
    return resources


def start_supervisor(deployment: Deployment) -> Any:
    """A handle of the deployment's supervisor. It is lost with the launcher's node, where it runs, unless it is detached:
    then it outlives the launcher, on any node but the head if there is one: the loss of the head must not take it, too.
    (Ray places actors that need no CPU anywhere, also with soft affinity.)"""
    where: dict[str, Any]
    if deployment.detached:
        head = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"])
        where = {"lifetime": "detached", "namespace": deployment.config.cluster.namespace}
        where |= {"label_selector": {NODE_LABEL: f"!{head}"}, "fallback_strategy": [{"label_selector": {}}]}
    else:
        here = ray.get_runtime_context().get_node_id()
        where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
    lasting = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 1000}
    return ray.remote(PoolSupervisor).options(name=SUPERVISOR, num_cpus=0, **lasting, **where).remote(deployment)
