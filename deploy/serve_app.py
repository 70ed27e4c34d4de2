"""The HTTP API as a Ray Serve application: an ingress replica with links of its own to the targets.

Calls to Ray actors are limited to the targets' addresses and the status.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import BackpressureConfig

from actors.gateway import LinkClient
from actors.processes import Directory
from actors.ray_pool import SUPERVISOR
from cluster.client import ClusterStatus
from cluster.config import Config
from cluster.errors import LinkClosed
from deploy.api.app import create_app
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from deploy.follow import follow
from deploy.haproxy import MAX_CLIENTS

logger = logging.getLogger(__name__)

APP = "outrider"
API_CPUS = 0.2
# Beyond HAProxy's connections: the API's own limits refuse calls, and probes never wait behind calls.
MAX_SERVE_QUEUED = 64
FIRST_LINK_S = 5.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """Arguments of a replica."""

    config: Config
    directory: Directory
    tokenizer_folder: str
    token: str


class ApiReplica:
    """The deployment's class. The FastAPI app is built in the replica."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._client: LinkClient | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        self._client = make_client(self._gateway)
        return build_asgi_app(self._gateway, self._client)

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises.

        Raises:
            LinkClosed: the replica's own client has failed.
        """
        if self._client is not None:
            self._client.check_health()


def make_client(gateway: Gateway) -> LinkClient:
    """The replica's links to the targets."""
    assert gateway.directory.model is not None
    supervisor = ray.get_actor(SUPERVISOR, namespace=gateway.config.cluster.namespace)

    async def status() -> ClusterStatus:
        try:
            answer: ClusterStatus = await supervisor.status.remote()
        except RayActorError as error:
            raise LinkClosed(f"the supervisor does not answer: {error}") from error
        return answer

    return LinkClient("api", gateway.directory.model, gateway.directory.addresses, status, gateway.token)


def build_asgi_app(gateway: Gateway, client: LinkClient) -> FastAPI:
    """The replica's app, which keeps the client's addresses up to date and closes it."""
    supervisor = ray.get_actor(SUPERVISOR, namespace=gateway.config.cluster.namespace)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(follow(client, supervisor, gateway.directory), name="follow targets")
        try:
            await asyncio.to_thread(client.wait_linked, FIRST_LINK_S)  # else the first calls would find no target
            yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await client.close()

    tokenizer = Tokenizer.from_folder(Path(gateway.tokenizer_folder))
    return create_app(client, tokenizer, ApiSettings.from_config(gateway.config.api), lifespan)


def build_application(gateway: Gateway) -> serve.Application:
    settings = ApiSettings.from_config(gateway.config.api)
    deployment: Any = serve.deployment(
        serve.ingress()(ApiReplica),
        name="api",
        num_replicas=1,
        max_ongoing_requests=MAX_CLIENTS,
        max_queued_requests=MAX_SERVE_QUEUED,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=settings.retry_after_s),
        graceful_shutdown_timeout_s=2,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": API_CPUS},
    )
    application: serve.Application = deployment.bind(gateway)
    return application


def run_application(gateway: Gateway) -> None:
    """Returns when the replica is ready and the proxy listens. Raises Serve's errors."""
    api = gateway.config.api
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(http_options={"host": api.host, "port": api.port}, logging_config=quiet)
    serve.run(
        build_application(gateway),
        name=APP,
        route_prefix="/",
        logging_config=quiet,
    )
