"""The cluster as an application of Ray Serve's declarative configuration, `import_path: deploy.ray_service:app`.

KubeRay deploys it on a Ray cluster whose nodes come and go. In place of `outrider serve`, the deployment `cluster` starts
targets and drafters. They are detached: a replica that replaces a lost one finds them, and only their last owner ends them,
with the application. The deployment `api` is the HTTP API.
"""

import asyncio
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict
from ray import serve

from actors.processes import Directory
from actors.ray_pool import Deployment
from cluster.config import Config, load
from cluster.config.file import NODE
from cluster.logs import log_as_configured
from cluster.placement import PlacementError
from deploy import serve_process
from deploy.deployment import ANSWER_S, END_S, NODES_POLL_S, DeployedCluster
from deploy.local_ray import LaunchError
from deploy.model_files import tokenizer_folder, with_files
from deploy.serve_app import ApiReplica, api_deployment
from drafters.shipped import with_shipped
from engine.cpu_setup import configure_cpu
from engine.models.prepare import resolve_model

logger = logging.getLogger(__name__)

CLUSTER_CPUS = 0.1


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
        folder = Path(tempfile.mkdtemp(prefix="outrider-"))  # unused: links between nodes are gRPC
        owner = ray.get_runtime_context().get_actor_id()
        self._cluster = DeployedCluster(config, folder, owns_ray=False, owner=owner)
        configure_cpu()
        self._deployment, self._directory = await asyncio.to_thread(lambda: self._cluster.find() or self._start())
        self._cluster.own()

    def deployed(self) -> tuple[Deployment, Directory]:
        return self._deployment, self._directory

    async def __del__(self) -> None:
        """Called by Serve when it stops the replica, not when the replica is lost."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """Unless another replica has replaced this one."""
        if self._cluster.is_owner():
            self._cluster.drain()
            self._cluster.end()

    def _start(self) -> tuple[Deployment, Directory]:
        """Waits for the nodes that the configuration needs, and starts it. Raises LaunchError or PlacementError."""
        config = with_files(self._config)
        model_folder = resolve_model(config.model.name, config.target.engine)
        end_s = time.monotonic() + self._config.supervision.start_timeout_s
        while True:
            try:
                deployment = self._cluster.reserve(config, model_folder)
                break
            except (PlacementError, LaunchError) as error:
                if time.monotonic() > end_s:
                    raise
                logger.warning("the deployment waits for nodes: %s", error)
                time.sleep(NODES_POLL_S)
        return deployment, self._cluster.start(deployment)


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
    config = config.changed(transport={"host": NODE})
    cluster: Any = serve.deployment(
        ClusterReplica,
        name="cluster",
        num_replicas=1,
        graceful_shutdown_timeout_s=config.api.drain_s + ANSWER_S + END_S,
        ray_actor_options={"num_cpus": CLUSTER_CPUS},
    )
    # Streams that are under way end, as those of a target do.
    return api_deployment(JoinedApiReplica, config.api, config.api.drain_s).bind(cluster.bind(config))
