"""The chart's serveConfigV2, started by `serve run` on Ray nodes with the labels and the environment of the chart's pods."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster
from ray.experimental.internal_kv import _internal_kv_get

from actors.ray_pool import SUPERVISOR
from benchmarks.server import START_S
from cluster.config import Config
from deploy.deployment import OWNERS
from deploy.local_ray import free_port
from tests.support.manifests import pod_templates, served_file
from tests.support.pods import environment_of, small_ray_service
from tests.support.waiting import DEADLINE_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.model]

STORE_BYTES = 80 * 2**20


def complete(http: httpx.Client) -> str:
    (model,) = http.get("/v1/models").json()["data"]
    prompt = {"model": model["id"], "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = http.post("/v1/completions", json=prompt)
    assert answer.status_code == httpx.codes.OK, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def manifest(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The RayService that the chart renders for a small configuration."""
    return small_ray_service(model_folder, tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def nodes(manifest: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A raylet for each pod, with its labels and its environment. HAProxy's wrapper, which the image has, is made here."""
    (container,) = pod_templates(manifest)[0]["spec"]["containers"]
    environment = environment_of(container, tmp_path_factory.mktemp("image"))
    environment |= {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port())}
    groups = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for group in groups:
                assert group["replicas"] == 1
                cluster.add_node(num_cpus=2, labels=group["labels"], object_store_memory=STORE_BYTES)
            ray.init(address=cluster.address, namespace="test", logging_level="ERROR", log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def url(manifest: dict[str, Any], nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the API, which `serve run` has deployed."""
    folder = tmp_path_factory.mktemp("pod")
    serve_config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = serve_config["applications"]
    mounted = folder / "config.yaml"
    mounted.write_text(served_file(manifest))
    application["args"] = {"config_file": str(mounted)}
    serve_config["http_options"] = {"host": "127.0.0.1", "port": (port := free_port())}
    (folder / "serve.yaml").write_text(yaml.safe_dump(serve_config))
    command = [str(Path(sys.executable).with_name("serve")), "run", str(folder / "serve.yaml"), "--address", nodes.address]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:

        def healthy() -> bool:
            assert running.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
            except httpx.TransportError:
                return False

        eventually(healthy, START_S)
        yield url
    finally:
        running.terminate()
        running.wait(DEADLINE_S)


def owner_of() -> bytes:
    return _internal_kv_get(Config().cluster.namespace, namespace=OWNERS)


def test_it_answers_as_the_cluster_would(url: str, manifest: dict[str, Any]) -> None:
    """Through the proxy with Outrider's configuration, which hides Ray Serve's own paths."""
    with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
        assert complete(http).startswith(" Paris")
        assert http.get("/-/routes").status_code == httpx.codes.NOT_FOUND
        status = lambda: http.get("/v1/outrider/status").json().get("targets", ())  # noqa: E731
        eventually(lambda: {target["state"] for target in status()} == {"ready"})
        groups = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        (gateway,) = [group["template"] for group in groups if group["groupName"] == "gateway"]
        probe = gateway["spec"]["containers"][0]["readinessProbe"]["httpGet"]
        assert http.get(probe["path"]).status_code == httpx.codes.OK


def test_each_part_is_on_its_own_nodes(url: str) -> None:
    label = {node["NodeID"]: node["Labels"].get("outrider/pool") for node in ray.nodes()}
    groups = ray.util.placement_group_table().values()
    where = {group["name"]: {label[node] for node in group["bundles_to_node_id"].values()} for group in groups}
    assert where == {"target-0": {"target"}, "drafter-ngram": {"drafter-ngram"}, "drafter-suffix": {"drafter-suffix"}}


def test_a_lost_replica_of_the_cluster_finds_its_processes(url: str) -> None:
    """The processes outlive it, and streams go on: no process is started again."""
    supervisor = ray.get_actor(SUPERVISOR, namespace=Config().cluster.namespace)
    pids, owner = ray.get(supervisor.pids.remote(), timeout=DEADLINE_S), owner_of()
    actors = ray.util.list_named_actors(all_namespaces=True)
    (replica,) = [one for one in actors if "#cluster#" in one["name"]]
    ray.kill(ray.get_actor(replica["name"], namespace=replica["namespace"]), no_restart=True)
    eventually(lambda: owner_of() != owner)
    assert pids.items() <= ray.get(supervisor.pids.remote(), timeout=DEADLINE_S).items()  # the router may be late
    with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
        assert complete(http).startswith(" Paris")


def test_deleting_the_application_ends_its_processes(url: str) -> None:
    """Last: what `serve run` deployed is gone."""
    from ray import serve

    serve.delete("outrider", _blocking=False)
    states = lambda: {group["state"] for group in ray.util.placement_group_table().values()}  # noqa: E731
    eventually(lambda: states() <= {"REMOVED"})
    with pytest.raises(ValueError, match="supervisor"):
        ray.get_actor(SUPERVISOR, namespace=Config().cluster.namespace)
