"""The HTTP API as a Ray Serve application: ingress replicas, each with links of its own to the targets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, BackpressureConfig

from actors import health
from actors.gateway import LinkClient
from actors.processes import Directory
from actors.ray_pool import SUPERVISOR
from actors.supervisor import TARGET_TIMEOUT_FACTOR
from cluster.client import ClusterStatus, ReplicaMetrics
from cluster.config import ApiConfig, Config, PolicyConfig, SupervisionConfig
from cluster.cpu_scheduling import run_in_foreground, switch_threads_quickly
from cluster.errors import LinkClosed
from cluster.logs import log_as_configured
from cluster.resolve import API_CPUS
from cluster.transport.tls import CertificateWatch
from cluster.types import Adapter
from deploy import serve_process
from deploy.api.app import create_app
from deploy.api.metrics import Peers
from deploy.api.settings import ApiSettings, sampling_defaults
from deploy.api.tasks import running
from deploy.api.tokenizer import Tokenizer
from deploy.haproxy import MAX_CLIENTS
from deploy.local_ray import joined_environment

logger = logging.getLogger(__name__)

APP = "outrider"
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # of the hosts that are all interfaces
# Beyond HAProxy's connections: the API's own limits refuse calls, and probes never wait behind calls.
MAX_SERVE_QUEUED = 64
TARGET_SHARE = 0.5  # of the calls that one of `max_replicas` may run: the load per replica at which Serve adds another
LOOK_BACK_S, UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 12.0, 3.0, 60.0
FIRST_LINK_S = 5.0
RETRY_S = 0.5


class ApiReplica:
    """The deployment's class. ``directory``: the targets' addresses at the start. ``token``: the links' secret."""

    def __init__(self, config: Config, directory: Directory, model_folder: str, token: str) -> None:
        self._config = config
        self._directory = directory
        self._model_folder = model_folder
        self._token = token
        self._client: LinkClient | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        run_in_foreground()
        serve_process.prepare()
        log_as_configured(self._config.observability)
        switch_threads_quickly()
        directory = self._directory
        assert directory.model is not None
        supervisor = ray.get_actor(SUPERVISOR, namespace=self._config.cluster.namespace)

        replica = serve.get_replica_context().replica_tag  # of a replica that replaces another, a new one
        watch = SupervisorWatch(supervisor, self._config.supervision, is_first_replica)

        async def status() -> ClusterStatus:
            status = watch.noted(await _answered(supervisor.status.remote()))
            if certificate is None:
                return status
            return replace(status, tls_not_after_s=await asyncio.to_thread(certificate.not_after_s))

        async def try_policy(policy: PolicyConfig | None, for_s: float) -> bool:
            return bool(await _answered(supervisor.try_policy.remote(policy, for_s)))

        async def swap_adapter(old: Adapter | None, new: Adapter | None) -> bool:
            changed: Directory | None = await _answered(supervisor.swap_adapter.remote(old, new))
            if changed is None or changed.model is None:
                return False
            client.set_model(changed.model)  # before `follow_targets`, so that the caller's next call finds it
            return True

        async def exchange(page: bytes) -> Sequence[bytes]:
            own = ReplicaMetrics(replica, page, client.recent_prefixes())
            others: Sequence[ReplicaMetrics] = await _answered(supervisor.exchange_metrics.remote(own))
            for one in others:
                client.learn_prefixes(one.prefixes)
            return [one.page for one in others]

        wait_s, tls = self._config.api.resume_wait_s, self._config.cluster.tls
        certificate = None if tls is None else CertificateWatch(tls)
        name = f"api-{replica}"
        client = self._client = LinkClient(name, directory.model, directory.addresses, status, self._token, wait_s, tls)

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            try:
                async with (
                    running(follow_targets(client, supervisor, directory), "follow targets"),
                    running(watch.run(), "watch the supervisor"),
                ):
                    await asyncio.to_thread(client.wait_linked, FIRST_LINK_S)  # else the first calls would find no target
                    yield
            finally:
                await client.close()

        tokenizer = Tokenizer.from_folder(Path(self._model_folder))
        settings = replace(
            ApiSettings.from_config(self._config.api, self._config.slo, self._config.observability).for_len(
                directory.model.max_model_len
            ),
            sampling_defaults=sampling_defaults(self._config.model, Path(self._model_folder)),
        )
        peers = Peers(replica, exchange) if settings.most > 1 else None
        return create_app(client, tokenizer, settings, lifespan, try_policy, peers, swap_adapter)

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises. Raises LinkClosed: the replica's client has failed."""
        if self._client is not None:
            self._client.check_health()


async def _answered(asked: Awaitable[Any]) -> Any:
    """The supervisor's answer. Raises LinkClosed: there is none."""
    try:
        return await asked
    except RayActorError as error:
        raise LinkClosed(f"the supervisor does not answer: {error}") from error


class SupervisorWatch:
    """Kills a supervisor that hangs, which nothing else would notice: targets serve on without it, and Ray restarts only
    what has ended. The next supervisor finds all processes.

    ``is_on_duty``: whether this replica of the API watches. One at a time may, since a second kill would hit the successor.
    """

    def __init__(self, supervisor: Any, config: SupervisionConfig, is_on_duty: Callable[[], bool]) -> None:
        self._supervisor = supervisor
        self._is_on_duty = is_on_duty
        self._period_s = health.PERIOD_S
        self._timeout_s = config.health_timeout_ms * TARGET_TIMEOUT_FACTOR / 2e3  # of one question; two are asked
        self._num_killed = 0

    def noted(self, status: ClusterStatus) -> ClusterStatus:
        """With how often it happened."""
        if not self._num_killed:
            return status
        note = f"the supervisor did not answer and was killed, {self._num_killed} times since this API process started"
        return replace(status, num_supervisor_kills=self._num_killed, notes=(*status.notes, note))

    async def run(self) -> None:
        """Until cancelled."""
        timeout_s, num_missed = self._timeout_s, 0
        while True:
            if not self._is_on_duty():
                num_missed = 0
                await asyncio.sleep(self._period_s)
                continue
            try:
                async with asyncio.timeout(timeout_s):
                    await self._supervisor.pids.remote()
                timeout_s, num_missed = self._timeout_s, 0
            except TimeoutError:
                num_missed += 1
                if num_missed < 2 or not self._is_on_duty():  # this process may have stood still itself
                    continue
                logger.error("the supervisor has not answered for %g s: it is killed, and Ray starts another", 2 * timeout_s)
                self._num_killed += 1
                timeout_s, num_missed = 2 * timeout_s, 0  # so that one that starts slowly is ready in time at last
                self._kill()
            except RayError:
                pass  # it has ended, which `follow_targets` reports, and Ray starts another
            except Exception:
                # No caller awaits this task, and without it nothing would see a hang.
                logger.exception("this API process could not ask the supervisor")
            await asyncio.sleep(self._period_s)

    def _kill(self) -> None:
        try:
            ray.kill(self._supervisor, no_restart=False)
        except RayError:
            pass  # it has ended meanwhile
        except Exception:
            logger.exception("this API process could not kill the supervisor")  # asked again, and killed then


def is_first_replica() -> bool:
    """Whether this replica has Serve's rank 0, as one replica has at a time. When it ends, another gets it."""
    return bool(serve.get_replica_context().rank.rank == 0)


async def follow_targets(client: LinkClient, supervisor: Any, known: Directory) -> None:
    """Passes every change of the targets' addresses, and of adapters, to the client, until cancelled."""
    while True:
        try:
            known = await supervisor.directory.remote(known)
            if known.model is not None:
                client.set_model(known.model)
            client.set_leaving(known.leaving)
            client.set_addresses(known.addresses)
            if known.ends:
                client.end_requests()
            continue
        except RayError as error:
            logger.warning("the supervisor does not answer, known targets stay in use: %s", error)
        except Exception:
            # No caller awaits this task, and without it this replica would lose a target that moves.
            logger.exception("this API process could not get the targets' addresses, known targets stay in use")
        await asyncio.sleep(RETRY_S)


def replicas_of(api: ApiConfig, shutdown_s: float) -> dict[str, Any]:
    """Options of the deployment: the number of replicas, fixed or by calls under way, and how long one that ends waits
    for its calls. ``shutdown_s``: where the number is fixed."""
    if api.most == api.replicas:
        return {"num_replicas": api.replicas, "graceful_shutdown_timeout_s": shutdown_s}
    scaling = AutoscalingConfig(
        min_replicas=api.replicas,
        max_replicas=api.most,
        target_ongoing_requests=TARGET_SHARE * api.max_concurrent_requests / api.most,
        look_back_period_s=LOOK_BACK_S,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
    )
    return {"autoscaling_config": scaling, "graceful_shutdown_timeout_s": max(shutdown_s, api.request_deadline_s)}


def api_deployment(replica: type["ApiReplica"], api: ApiConfig, shutdown_s: float) -> Any:
    """Of Serve, whose ``bind`` takes the arguments of ``replica``. ``shutdown_s``: as of ``replicas_of``."""
    return serve.deployment(
        serve.ingress()(replica),
        name="api",
        **replicas_of(api, shutdown_s),
        max_ongoing_requests=MAX_CLIENTS,
        max_queued_requests=MAX_SERVE_QUEUED,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=ApiSettings.from_config(api).retry_after_s),
        health_check_period_s=5,
        ray_actor_options={"num_cpus": API_CPUS},
    )


def run_application(config: Config, directory: Directory, model_folder: str, token: str) -> None:
    """Returns when the replicas are ready and the proxy listens. Raises Serve's errors."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    application = api_deployment(ApiReplica, config.api, 2).bind(config, directory, model_folder, token)
    start = partial(serve.start, http_options={"host": config.api.host, "port": config.api.port}, logging_config=quiet)
    for is_last in (False, True):
        try:
            is_everywhere = config.api.host in LOOPBACK_OF  # on all interfaces: HAProxy reaches replicas at loopback
            if config.cluster.ray_address is None or not is_everywhere:
                start()
            else:  # Serve's processes inherit the environment of what starts their controller
                env = {"env_vars": joined_environment()}
                ray.get(ray.remote(num_cpus=0, max_retries=0, runtime_env=env)(lambda: bool(start())).remote())
            serve.run(application, name=APP, route_prefix="/", logging_config=quiet)
            return
        except TimeoutError as error:
            if is_last:
                raise
            # After three failed reloads Serve 2.60 leaves HAProxy without the application, until its next change.
            logger.warning("Ray Serve deploys the application once more: %s", error)
