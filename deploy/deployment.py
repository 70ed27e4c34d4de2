"""A deployment on a Ray cluster: placement groups, the supervisor with its processes, the HTTP application."""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from ray import serve
from ray._private.state import jobs
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.serve.schema import ProxyStatus
from ray.util import get_placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from actors.drafter_loader import memory_budget
from actors.processes import Directory, ProcessEnded
from actors.ray_groups import named_groups
from actors.ray_pool import SUPERVISOR, Deployment, start_supervisor
from cluster.config import Config, show
from cluster.errors import InvalidField
from cluster.placement import TARGET_PREFIX, PlacementPlan, drafter_name, place
from cluster.resolve import resolve
from cluster.state import open_store, state_fault
from cluster.transport import tls
from cluster.transport.stream import read_secret
from cluster.types import ModelInfo
from deploy import local_ray
from deploy.api.settings import sampling_defaults
from deploy.console import say_step
from deploy.local_ray import LaunchError
from deploy.memory import cached_tokens, sized
from deploy.placement_groups import as_made, make_groups, read_inventory, with_cores, with_gpu_memory
from deploy.serve_app import APP, LOOPBACK_OF, run_application
from engine.cpu_level import VARIABLE as CPU_VARIABLE
from engine.dtypes import resolve_dtypes
from engine.model_facts import read_facts
from engine.vllm.environment import torch_has_cuda

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a call of Ray that changes nothing
SPAWN_S = 60.0  # beyond a call's own deadline during the start, while Ray starts workers and models load
ANSWER_S = 60.0  # for a supervisor that Ray restarts on another node
END_S = 30.0
NODES_POLL_S = 2.0
OWNERS = "outrider-owners"  # of deployments, in Ray's key-value store


class DeployedCluster(AbstractContextManager["DeployedCluster"]):
    """A context manager: leaving it ends everything that it owns, at any stage of the start.

    On a Ray cluster that it joined, processes outlive their owner's loss: the next owner finds them.
    """

    def __init__(self, config: Config, folder: Path, *, owns_ray: bool, owner: str | None = None) -> None:
        """``owner``: by default this job of Ray."""
        self._config = config
        self._folder = folder
        self._owns_ray = owns_ray
        self._owner = owner or ("" if owns_ray else ray.get_runtime_context().get_job_id())
        self._source = hashlib.sha256(show(config).encode()).hexdigest()
        self._groups: dict[str, PlacementGroup] = {}
        self._supervisor: Any = None
        self._ray_processes = psutil.Process().children() if owns_ray else []

    def reserve(self, config: Config, model_folder: Path) -> Deployment:
        """Resolves ``config``, this cluster's with the files of its models, for the cluster's machines, and reserves a
        placement group for each of its parts. Raises LaunchError, PlacementError or InvalidField: it does not fit."""
        file = config.cluster.token_file
        token = secrets.token_hex(32) if file is None else read_secret(file)
        inventory = with_cores(read_inventory(ray.nodes()))
        sampling_defaults(config.model, model_folder)  # refused here rather than in the API's process
        max_threads = read_facts(config, model_folder).useful_threads
        config = resolve_dtypes(resolve(config, inventory, max_threads, uses_gpus=torch_has_cuda()))
        facts = read_facts(config, model_folder)  # in the dtype of its device
        if config.target.device == "cuda" or any(d.device == "cuda" for d in config.drafters):
            inventory = with_gpu_memory(inventory)
        nodes = inventory.matching(config.target.resources.node_labels).nodes
        gpu_bytes = min((node.gpu_bytes for node in nodes if node.gpu_bytes is not None), default=None)
        config = sized(config, facts, gpu_bytes)
        plan = place(config, inventory)
        if config.transport.kind == "grpc" and config.cluster.tls is not None:
            tls.check(config.cluster.tls)  # refused here rather than in each process
            _warn_of_ranks(plan)
        self._groups = make_groups(plan, detached=not self._owns_ray)
        budget = memory_budget(config, as_made(plan, self._groups), inventory, cached_tokens(config, facts, gpu_bytes))
        here, model = str(self._folder), str(model_folder)
        return Deployment(config, self._groups, here, token, budget, model, self._source, detached=not self._owns_ray)

    def deploy(self, model_folder: Path) -> ModelInfo:
        """Returns when the targets are ready and the HTTP server listens. Raises as ``reserve``."""
        found = None if self._owns_ray else self._take_over()
        if found is None:
            deployment = self.reserve(self._config, model_folder)
            num, drafters = deployment.config.target.replicas, ", ".join(one.name for one in deployment.config.drafters)
            say_step(f"the supervisor starts {num} targets, then drafters: {drafters or 'none'}")
            directory = self.start(deployment)
            say_step("the targets are ready, the API starts")
        else:
            deployment, directory = found
            say_step("the deployment runs already, and is taken over")
        assert directory.model is not None, "the supervisor starts with a directory that names the model"
        if found is not None and APP in serve.status().applications:
            return directory.model
        try:
            run_application(deployment.config, directory, deployment.model_folder, deployment.token)
        except (RuntimeError, RayActorError, RayTaskError, TimeoutError) as error:
            for line in local_ray.proxy_log_tail(self._folder) if self._owns_ray else ():
                logger.error("the proxy's log: %s", line)
            raise LaunchError(f"the HTTP server did not start: {error}") from error
        return directory.model

    def start(self, deployment: Deployment) -> Directory:
        """Starts the processes. Returns when the targets are ready. Raises LaunchError."""
        config = deployment.config
        _warn_of_state(config)
        self._supervisor = start_supervisor(deployment)
        try:
            start_s = config.supervision.start_timeout_s
            directory: Directory = ray.get(self._supervisor.ready.remote(), timeout=start_s + SPAWN_S)
            for name, reason in ray.get(self._supervisor.reasons.remote(), timeout=SPAWN_S).items():
                logger.warning("%s is not ready and is restarted: %s", name, reason)
        except GetTimeoutError as error:
            raise LaunchError(f"the targets were not ready after {start_s:g} s (supervision.start_timeout_s)") from error
        except (RayTaskError, RayActorError) as error:
            raise LaunchError(str(getattr(error, "cause", None) or error)) from error
        return directory

    # ---- a deployment that outlives its owner

    def _take_over(self) -> tuple[Deployment, Directory] | None:
        """As ``find``. Raises LaunchError: the owner of the running one lives."""
        owner, namespace = self.owner(), self._config.cluster.namespace
        job = next((one for one in jobs() if one["JobID"] == owner), None)
        if not job["IsDead"] if job else owner is not None and APP in serve.status().applications:
            where = f"`outrider serve` on {job['DriverIPAddress']}" if job else "an application of Ray Serve"
            raise LaunchError(f"the deployment {namespace} (cluster.namespace) belongs to {where}, which still runs: end it")
        self.own()
        return self.find()

    def own(self) -> None:
        """From now on only this one ends the deployment."""
        _internal_kv_put(self._config.cluster.namespace, self._owner, namespace=OWNERS)

    def owner(self) -> str | None:
        """None: the deployment has none, or there is no deployment."""
        found = _internal_kv_get(self._config.cluster.namespace, namespace=OWNERS)
        return found.decode() if found else None

    def find(self) -> tuple[Deployment, Directory] | None:
        """A running deployment of this configuration, of which a target is ready. Another one is ended.

        The node of the supervisor may be lost with the former owner's, while targets serve on: it is waited for, as long as
        a start may take.
        """
        end_s = time.monotonic() + self._config.supervision.start_timeout_s
        while True:
            try:
                supervisor = self._found_supervisor()
                deployment: Deployment = ray.get(supervisor.deployment.remote(), timeout=ANSWER_S)
                if deployment.source == self._source:
                    directory: Directory = ray.get(supervisor.ready.remote(every=False), timeout=ANSWER_S)
                    self._supervisor = supervisor
                    return deployment, directory
                logger.warning("the configuration has changed, so that targets and drafters are started again")
                break
            except ValueError:  # there is no supervisor
                break
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                if isinstance(getattr(error, "cause", None), ProcessEnded) or time.monotonic() > end_s:
                    logger.warning("no target started, or the supervisor does not answer: all start again: %s", error)
                    break
                logger.warning("the deployment waits for its supervisor: %s", error)
                time.sleep(NODES_POLL_S)
        self.clear()
        return None

    def _found_supervisor(self) -> Any:
        """Raises ValueError: there is none."""
        return ray.get_actor(SUPERVISOR, namespace=self._config.cluster.namespace)

    def clear(self) -> None:
        """Ends the supervisor, and with the placement groups all other processes."""
        try:
            supervisor = self._found_supervisor()
            try:
                ray.get(supervisor.stop.remote(), timeout=END_S)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                logger.warning("the supervisor is killed: %s", error)
            ray.kill(supervisor, no_restart=True)
        except ValueError:  # there is none
            pass
        for name in named_groups():
            if name.startswith((TARGET_PREFIX, drafter_name(""))):
                remove_placement_group(get_placement_group(name))

    # ---- while it serves

    def api_host(self) -> str:
        """At which the API answers this process. Raises InvalidField: never at the address of the configuration."""
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        here = ray.get_runtime_context().get_node_id()
        return answering_host(self._config.api.host, here, serve.status().proxies, addresses)

    def dead_process(self) -> str | None:
        """A process of this machine's Ray that has ended and cannot be replaced."""
        dead = (p for p in self._ray_processes if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE)
        return next((f"process {process.pid}" for process in dead), None)

    def drain(self) -> None:
        """Accepts no more requests, waits `api.drain_s` for running ones, and lets the others end with an error."""
        if self._supervisor is None or not self.is_owner():
            return
        deadline_s = self._config.api.drain_s
        try:
            num = ray.get(self._supervisor.num_requests.remote(), timeout=CALL_DEADLINE_S)
            logger.info("draining %d requests for at most %g s (api.drain_s); a second signal ends at once", num, deadline_s)
            if not ray.get(self._supervisor.drain.remote(deadline_s), timeout=deadline_s + END_S):
                logger.warning("requests that were not complete after %g s ended with an error", deadline_s)
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            logger.warning("the requests under way could not be drained: %s", error)

    def stop(self) -> None:
        if self._owns_ray:
            local_ray.stop()  # with everything that runs on it
            return
        try:
            if self.is_owner():
                if APP in serve.status().applications:
                    serve.delete(APP)
                self.end()
        finally:
            ray.shutdown()

    def end(self) -> None:
        """Of a deployment that this one owns: ends its processes."""
        self.clear()
        _internal_kv_del(self._config.cluster.namespace, namespace=OWNERS)

    def is_owner(self) -> bool:
        return self._owns_ray or self.owner() == self._owner

    def __exit__(self, *_: object) -> None:
        self.stop()


def answering_host(host: str, here: str, proxies: Mapping[str, ProxyStatus], addresses: Mapping[str, str]) -> str:
    """Where a process on the node ``here`` reaches an API that listens at ``host``. Serve has a proxy on the head and on
    each node with a replica of the API, which need not be this one.

    Args:
        proxies: by their nodes.
        addresses: of all nodes.

    Raises:
        InvalidField: ``host`` is loopback, and this node has no proxy.
    """
    if host not in LOOPBACK_OF:
        if proxies and here not in proxies and _is_loopback(host):
            reason = "is not answered on this machine, which runs neither Ray's head nor a replica of the API: use 0.0.0.0"
            raise InvalidField("api.host", host, reason)
        return host
    healthy = sorted(node for node, status in proxies.items() if status is ProxyStatus.HEALTHY)
    return LOOPBACK_OF[host] if here in healthy or not healthy else addresses[healthy[0]]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def connect(config: Config, folder: Path) -> DeployedCluster:
    """Starts Ray on this machine, or joins the cluster that the configuration names. Raises LaunchError."""
    namespace, address = config.cluster.namespace, config.cluster.ray_address
    if address is None:
        local_ray.start(folder, namespace)
        return DeployedCluster(config, folder, owns_ray=True)
    level = os.environ.get(CPU_VARIABLE)
    runtime_env = {"env_vars": {CPU_VARIABLE: level}} if level else None  # of the actors on all nodes
    try:
        ray.init(address=address, namespace=namespace, logging_level=logging.ERROR, runtime_env=runtime_env)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise LaunchError(f"no Ray cluster answers at {address} (cluster.ray_address): {error}") from error
    if config.cluster.ray_auth == "token" and not asks_for_token(ray.get_runtime_context().gcs_address):
        ray.shutdown()
        raise LaunchError(
            f"the Ray cluster at {address} (cluster.ray_address) asks for no token, so that it runs code for whoever "
            "reaches it: set RAY_AUTH_MODE=token on its machines, or cluster.ray_auth: none to join it all the same"
        )
    return DeployedCluster(config, folder, owns_ray=False)


def asks_for_token(gcs_address: str) -> bool:
    """Whether a Ray cluster refuses a call without one, or, with RAY_USE_TLS, a connection without a certificate.

    Raises LaunchError: it does not answer in time.
    """
    with grpc.insecure_channel(gcs_address) as channel:
        try:
            channel.unary_unary(ALIVE)(b"", timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE):
                raise LaunchError(f"the Ray cluster at {gcs_address} does not answer: {error}") from error
            return True
    return False


def _warn_of_state(config: Config) -> None:
    """Warns if the state store cannot be used; serving works without it."""
    store = open_store(config.cluster.state, config.cluster.namespace)
    fault = state_fault(store)
    store.close()
    if fault is not None:
        logger.warning("serving continues without the state store, and what is learned is lost at a restart: %s", fault)


def _warn_of_ranks(plan: PlacementPlan) -> None:
    """Warns of what ``cluster.tls`` does not cover."""
    for group in plan.groups:
        if group.name.startswith(TARGET_PREFIX) and len({bundle.node for bundle in group.bundles}) > 1:
            logger.warning("the ranks of %s are on several machines, and what they exchange is not encrypted", group.name)
