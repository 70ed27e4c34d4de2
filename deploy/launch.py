"""``outrider serve``: starts a cluster, waits for its first answer, and ends all of it on a signal."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from cluster.config import Config
from cluster.logs import log_as_configured
from cluster.transport import bracketed
from cluster.types import ModelInfo
from deploy.api.app import check_tracing
from deploy.api.dashboard.pages import PAGE
from deploy.api.middleware import AuditLog
from deploy.api.tenants import ApiKeys
from deploy.console import say_step, strip_colours
from deploy.local_ray import LaunchError, check_port, prepare_environment, run_folder
from deploy.memory import check_memory
from deploy.model_files import with_files
from deploy.stop import Stop, Stopped, stoppable
from engine.cpu_setup import configure_cpu
from engine.model_facts import read_facts
from engine.models.prepare import resolve_model

FIRST_ANSWER_S = 60.0
ANSWER_POLL_S = 0.1
ALIVE_POLL_S = 1.0
_LOGGED = ("cluster", "engine", "deploy")  # CPU level, dtypes, state store, and the steps of the start


def serve(config: Config) -> None:
    """Serves until SIGINT or SIGTERM, which drains (`api.drain_s`); a second one ends at once. For the main thread.

    Raises LaunchError, ModelUnavailable, PlacementError or InvalidField: the cluster did not start, or ended.
    """
    log_as_configured(config.observability, _LOGGED)
    check_tracing(config.observability)  # refused here rather than in the API's process
    configure_cpu()
    with stoppable() as stop:
        if config.cluster.ray_address is None:  # else a proxy may listen there, of a deployment that is taken over
            check_port(config.api.host, config.api.port)
        for file in (config.api.api_keys_file, config.api.operator_keys_file):
            if file is not None:
                ApiKeys.from_file(file, config.api.most)  # refused here rather than in the API's process
        if config.observability.audit_log_file is not None:
            AuditLog(config.observability.audit_log_file).close()
        say_step(f"the model {config.model.name} is checked")
        config = with_files(config)
        model_folder = resolve_model(config.model.name, config.target.engine)
        read_facts(config, model_folder)  # a model or a number of ranks that the engine cannot serve is refused here
        check_memory(config)
        with run_folder() as folder:
            if config.cluster.ray_address is None:
                prepare_environment(folder)
            _serve(config, model_folder, folder, stop)


def _serve(config: Config, model_folder: Path, folder: Path, stop: Stop) -> None:
    # Imported here: Ray reads the environment at import.
    from deploy.deployment import connect

    strip_colours()
    address = config.cluster.ray_address
    say_step("Ray starts on this machine" if address is None else f"the Ray cluster at {address} is joined")
    with connect(config, folder) as cluster:
        stop.listen()  # Ray has replaced the handler of SIGTERM
        model = cluster.deploy(model_folder)
        stop.check()
        say_step("a first answer is awaited")
        url = _await_answer(config, model, cluster.api_host, stop)
        say_step("ready")
        print(f"Outrider serves {model.name} at {url}/v1, with a dashboard at {url}{PAGE}", flush=True)
        try:
            while (dead := cluster.dead_process()) is None:
                stop.check()
                time.sleep(ALIVE_POLL_S)
        except Stopped:
            cluster.drain()
            return
        raise LaunchError(f"{dead} of the Ray cluster ended, so the cluster was stopped: start it again")


def _await_answer(config: Config, model: ModelInfo, host: Callable[[], str], stop: Stop) -> str:
    """Waits for the first answered completion, or for a healthy API if it needs keys. Returns where it answered."""
    end_s = time.monotonic() + FIRST_ANSWER_S
    url, last = "", "nothing"
    body = {"model": model.name, "prompt": "Hello", "max_tokens": 1}
    has_keys = config.api.api_keys_file is not None
    with httpx.Client(timeout=FIRST_ANSWER_S, trust_env=False) as client:
        while time.monotonic() < end_s:
            stop.check()
            url = f"http://{bracketed(host())}:{config.api.port}"
            try:
                response = client.get(f"{url}/health") if has_keys else client.post(f"{url}/v1/completions", json=body)
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == httpx.codes.OK:
                    return url
                last = f"{response.status_code} {response.text[:200]}"
            time.sleep(ANSWER_POLL_S)
    raise LaunchError(f"{url} did not answer a first completion within {FIRST_ANSWER_S:g} s; last answer: {last}")
