"""The cluster as an application of Ray Serve's declarative configuration, `import_path: deploy.ray_service:app`.

KubeRay deploys it on a Ray cluster whose nodes come and go. In place of `outrider serve`, the deployment `cluster` starts
targets and drafters. They are detached: a replica that replaces a lost one finds them, and only their last owner ends them,
with the application. The deployment `api` is the HTTP API.
"""

import asyncio
import hashlib
import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray._raylet import PlacementGroupID
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.serve.config import BackpressureConfig
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from actors.processes import Directory, ProcessEnded
from actors.ray_pool import SUPERVISOR, Deployment
from cluster.config import Config, load, show
from cluster.config.file import NODE
from cluster.logs import log_as_configured
from cluster.placement import PlacementError, drafter_name, target_name
from cluster.resolve import API_CPUS
from deploy import serve_process
from deploy.api.settings import ApiSettings
from deploy.deployment import DeployedCluster
from deploy.haproxy import MAX_CLIENTS
from deploy.local_ray import LaunchError
from deploy.model_files import tokenizer_folder, with_files
from deploy.serve_app import MAX_SERVE_QUEUED, ApiReplica, replicas_of
from drafters.shipped import with_shipped
from engine.cpu_setup import configure_cpu
from engine.models.prepare import resolve_model

logger = logging.getLogger(__name__)

CLUSTER_CPUS = 0.1
NODES_POLL_S = 2.0
ANSWER_S = 60.0  # for a supervisor that Ray restarts on another node
END_S = 30.0


class Arguments(BaseModel):
    """``args`` of the application."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config_file: Path  # the file of `outrider serve`, on the node that builds the application


class ClusterReplica:
    """The deployment ``cluster``. Its replica is ready when the targets are."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # which Serve awaits
        log_as_configured(config.observability)
        serve_process.prepare()
        self._config = config
        self._source = hashlib.sha256(show(config).encode()).hexdigest()
        self._name = ray.get_runtime_context().get_actor_id()
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))  # unused: links between nodes are gRPC
        configure_cpu()
        self._deployment, self._directory = await asyncio.to_thread(lambda: self._find() or self._start())
        await self._supervisor().set_owner.remote(self._name)

    def deployed(self) -> tuple[Deployment, Directory]:
        return self._deployment, self._directory

    async def __del__(self) -> None:
        """Called by Serve when it stops the replica, not when the replica is lost."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            owner = ray.get(self._supervisor().owner.remote(), timeout=ANSWER_S)
            if owner != self._name:
                return  # of a replica that replaces this one
            drain_s = self._config.api.drain_s
            ray.get(self._supervisor().drain.remote(drain_s), timeout=drain_s + END_S)
        except (RayActorError, RayTaskError, GetTimeoutError, ValueError) as error:
            logger.warning("the requests under way could not be drained: %s", error)
        self._clear()

    def _supervisor(self) -> Any:
        """Raises ValueError: there is none."""
        return ray.get_actor(SUPERVISOR, namespace=self._config.cluster.namespace)

    def _find(self) -> tuple[Deployment, Directory] | None:
        """A running deployment of this configuration, of which a target is ready. Another one is ended.

        The node of the supervisor may be lost with this replica's, while targets serve on: it is waited for, as long as a
        start may take.
        """
        end_s = time.monotonic() + self._config.supervision.start_timeout_s
        while True:
            try:
                supervisor = self._supervisor()
                deployment: Deployment = ray.get(supervisor.deployment.remote(), timeout=ANSWER_S)
                if deployment.source == self._source:
                    directory: Directory = ray.get(supervisor.ready.remote(every=False), timeout=ANSWER_S)
                    return deployment, directory
                logger.warning("the configuration has changed, so that targets and drafters are started again")
                break
            except ValueError:  # there is no supervisor
                break
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                if isinstance(getattr(error, "cause", None), ProcessEnded):
                    logger.warning("no target started, so that targets and drafters are started again: %s", error)
                    break
                if time.monotonic() > end_s:
                    logger.warning(
                        "the supervisor does not answer, so that targets and drafters are started again: %s", error
                    )
                    break
                logger.warning("the deployment waits for its supervisor: %s", error)
                time.sleep(NODES_POLL_S)
        self._clear()
        return None

    def _start(self) -> tuple[Deployment, Directory]:
        """Waits for the nodes that the configuration needs, and starts it. Raises LaunchError or PlacementError."""
        config = with_files(self._config)
        cluster = DeployedCluster(config, self._folder, owns_ray=False, detached=True)
        model_folder = resolve_model(config.model.name, config.target.engine)
        end_s = time.monotonic() + self._config.supervision.start_timeout_s
        while True:
            try:
                reserved = cluster.reserve(model_folder)
                break
            except (PlacementError, LaunchError) as error:
                if time.monotonic() > end_s:
                    raise
                logger.warning("the deployment waits for nodes: %s", error)
                time.sleep(NODES_POLL_S)
        deployment = replace(reserved, model_folder=str(model_folder), source=self._source)
        return deployment, cluster.start(deployment)

    def _clear(self) -> None:
        """Ends the supervisor, and with the placement groups all other processes."""
        try:
            supervisor = self._supervisor()
            try:
                ray.get(supervisor.stop.remote(), timeout=END_S)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                logger.warning("the supervisor is killed: %s", error)
            ray.kill(supervisor, no_restart=True)
        except ValueError:  # there is none
            pass
        prefixes = (target_name(0).removesuffix("0"), drafter_name(""))
        for key, group in placement_group_table().items():
            if group["name"].startswith(prefixes) and group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(key)))


class JoinedApiReplica(ApiReplica):
    """The deployment ``api``: waits for the deployment ``cluster``."""

    async def __init__(self, cluster: Any) -> None:  # type: ignore[misc]  # which Serve awaits
        configure_cpu()
        deployment, directory = await cluster.deployed.remote()
        folder = await asyncio.to_thread(tokenizer_folder, deployment.config, deployment.model_folder)
        super().__init__(deployment.config, directory, folder, deployment.token)


def app(arguments: Arguments) -> Any:
    """Builds the application. Raises ConfigError or InvalidField: the file cannot be used."""
    config = with_shipped(load(arguments.config_file))
    config = config.model_copy(update={"transport": config.transport.model_copy(update={"host": NODE})})
    cluster: Any = serve.deployment(
        ClusterReplica,
        name="cluster",
        num_replicas=1,
        graceful_shutdown_timeout_s=config.api.drain_s + ANSWER_S + END_S,
        ray_actor_options={"num_cpus": CLUSTER_CPUS},
    )
    api: Any = serve.deployment(
        serve.ingress()(JoinedApiReplica),
        name="api",
        **replicas_of(config.api, config.api.drain_s),  # streams that are under way end, as those of a target do
        max_ongoing_requests=MAX_CLIENTS,
        max_queued_requests=MAX_SERVE_QUEUED,
        backpressure_config=BackpressureConfig(
            status_code=429, retry_after_s=ApiSettings.from_config(config.api).retry_after_s
        ),
        health_check_period_s=5,
        ray_actor_options={"num_cpus": API_CPUS},
    )
    return api.bind(cluster.bind(config))
