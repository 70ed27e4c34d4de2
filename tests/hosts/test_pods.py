"""The chart's pods as hosts of their own, with the commands that KubeRay gives them."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks import hosts as host_network
from benchmarks.hosts import HEAD_PORT, JOIN_S, Host, Hosts
from tests.support.manifests import served_file
from tests.support.pods import environment_of, small_ray_service
from tests.support.waiting import DEADLINE_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.nightly]

AGENT_PORT, DASHBOARD_PORT = 52365, 8265
CPUS = 2  # of each pod but the head
Pods = dict[str, tuple[Host, dict[str, Any]]]


@pytest.fixture(scope="module")
def manifest(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_ray_service(model_folder, tmp_path_factory.mktemp("state"))


def environment(container: dict[str, Any], hosts: Hosts) -> dict[str, str]:
    """HAProxy's files are beside Ray's: what the hosts have of /tmp is one."""
    at = hosts.temporary
    return environment_of(container, hosts.folder) | {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(at / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(at / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(at / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(at),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(at / "server-state"),
    }


def await_gcs(host: Host, head: Host) -> None:
    """As the init container of a worker."""
    ask = host.command(sys.executable, "-m", "ray.scripts.scripts", "health-check", f"--address={head.address}:{HEAD_PORT}")
    end_s = time.monotonic() + JOIN_S
    while subprocess.run(ask, env=host.environment, capture_output=True).returncode:
        assert time.monotonic() < end_s, "the GCS did not answer"


@pytest.fixture(scope="module")
def pods(manifest: dict[str, Any]) -> Iterator[tuple[Hosts, Pods]]:
    """Of the head and each group: its host and its container."""
    if reason := host_network.why_not():
        pytest.skip(reason)
    spec = manifest["spec"]["rayClusterConfig"]
    with Hosts() as hosts:
        found: Pods = {}
        for name, group in [("head", spec["headGroupSpec"])] + [(one["groupName"], one) for one in spec["workerGroupSpecs"]]:
            (container,) = group["template"]["spec"]["containers"]
            host = hosts.add()
            asked = {key: value for key, value in group["rayStartParams"].items() if key != "num-cpus"}
            words = [f"--{key}={value}" for key, value in asked.items()]
            words += [f"--labels={key}={value}" for key, value in group.get("labels", {}).items()]
            words += [f"--dashboard-agent-listen-port={AGENT_PORT}", "--metrics-export-port=8080"]
            if name == "head":
                words = [one for one in words if not one.startswith("--dashboard-host")]
                words += ["--head", f"--port={HEAD_PORT}", "--dashboard-host=0.0.0.0", "--num-cpus=0"]
                words += [f"--temp-dir={hosts.temporary / 'ray'}"]
            else:
                await_gcs(host, found["head"][0])
                words += [f"--address={found['head'][0].address}:{HEAD_PORT}", f"--num-cpus={CPUS}"]
            host.start_ray(*words, environment=environment(container, hosts))
            found[name] = host, container
        hosts.wait_joined(found["head"][0], len(found))
        yield hosts, found


def answers(host: Host, probe: Mapping[str, Any], ports: Mapping[str, int]) -> bool:
    port = ports.get(probe["port"], probe["port"])
    try:
        return httpx.get(f"http://{host.address}:{port}{probe['path']}", trust_env=False).is_success
    except httpx.TransportError:
        return False


def targets(host: Host) -> list[psutil.Process]:
    found = []
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            found += [process] if process.name().startswith("ray::TargetActor") else []
    return found


def test_pods_serve_pass_their_probes_and_end(pods: tuple[Hosts, Pods], manifest: dict[str, Any], tmp_path: Path) -> None:
    hosts, found = pods
    serve_config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    mounted = tmp_path / "config.yaml"
    mounted.write_text(served_file(manifest))
    serve_config["applications"][0]["args"] = {"config_file": str(mounted)}
    token = (hosts.folder / "token").read_text()
    head, gateway = found["head"][0], found["gateway"][0]
    operator = httpx.Client(
        base_url=f"http://{head.address}:{DASHBOARD_PORT}",
        headers={"authorization": f"Bearer {token}"},
        timeout=DEADLINE_S,
        trust_env=False,
    )
    with operator:
        eventually(lambda: answers(head, {"port": DASHBOARD_PORT, "path": "/api/gcs_healthz"}, {}))
        answer = operator.put("/api/serve/applications/", json=serve_config)  # as KubeRay's controller
        assert answer.is_success, answer.text
        for host, container in found.values():
            ports = {one["name"]: one["containerPort"] for one in container["ports"]}
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe := container.get(kind):
                    eventually(lambda host=host, probe=probe, ports=ports: answers(host, probe["httpGet"], ports))  # type: ignore[misc]
        with httpx.Client(base_url=f"http://{gateway.address}:8000", timeout=DEADLINE_S, trust_env=False) as http:
            body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            eventually(lambda: http.post("/v1/completions", json=body).is_success)
            assert http.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith(" Paris")
            assert http.get("/-/routes").status_code == httpx.codes.NOT_FOUND
        assert len(targets(found["target"][0])) == 1
        assert operator.delete("/api/serve/applications/").is_success
    eventually(lambda: not targets(found["target"][0]))
