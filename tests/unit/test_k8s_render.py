"""`outrider k8s render`: every example becomes pods that hold what its file asks for, and a valid chart."""

import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml
from gguf import GGUFWriter
from typer.testing import CliRunner

from cluster.config import (
    ApiConfig,
    ClusterConfig,
    Config,
    DrafterConfig,
    NgramOptions,
    Resources,
    ScalingConfig,
    SloClass,
    SloConfig,
    StateConfig,
    TargetConfig,
    load,
)
from cluster.errors import InvalidField
from cluster.placement import PlacementError, place
from cluster.resolve import Inventory, Node, resolve
from deploy.cli import app
from deploy.k8s.kustomize import MODEL_GB
from deploy.k8s.render import GPU, Options, _weights_on_disk_gb, for_cluster, values_for
from drafters.shipped import with_shipped
from tests.support.manifests import ROOT, documents, only, problems, render

EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))


def values_of(example: Path, **options: Any) -> dict[str, Any]:
    return values_for(with_shipped(load(example)), Options(**{"model_gb": MODEL_GB, **options}))


def pods_of(values: dict[str, Any]) -> Inventory:
    """The Ray nodes of the groups, as KubeRay gives them their resources, after a head without any."""
    nodes = [Node("head", 0, labels={"outrider/pool": "head"}), Node("gateway-0", 2, labels={"outrider/pool": "gateway"})]
    groups = {"target": values["worker"], **values["additionalWorkerGroups"]}
    for name, group in groups.items():
        limits = group["resources"]["limits"]
        for i in range(group["replicas"]):
            nodes.append(Node(f"{name}-{i}", float(limits["cpu"]), float(limits.get(GPU, 0)), group["labels"]))
    return Inventory(tuple(nodes))


def config_of(values: dict[str, Any], folder: Path) -> Config:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values["modelSpec"]["config"]))
    return load(file)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_become_valid_manifests(example: Path) -> None:
    manifests = render(values_of(example, models_claim="models", image="registry:5000/outrider:1"))
    assert [problem for manifest in manifests for problem in problems(manifest)] == []
    spec = only(manifests, "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "registry:5000/outrider:1"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_pods_hold_the_whole_file(example: Path, tmp_path: Path) -> None:
    """Placed by the code that places it on the cluster, and each part on the pods that are meant for it."""
    values = values_of(example)
    config, pods = config_of(values, tmp_path), pods_of(values)
    assert config == for_cluster(with_shipped(load(example)))
    resolved = resolve(config, pods)
    sizes = {"max_pass_tokens": config.target.longest_pass, "kv_cache_gb": config.target.kv_cache_bytes / 2**30}
    assert resolved.target == config.target.model_copy(update=sizes)
    plan = place(resolved, pods)
    pools = {node.name: node.labels["outrider/pool"] for node in pods.nodes}
    used = {bundle.node for group in plan.groups for bundle in group.bundles}
    assert not {"head", "gateway"} & {pools[name] for name in used}
    targets = [group for group in plan.groups if group.name.startswith("target-")]
    assert all(len({bundle.node for bundle in group.bundles}) == 1 for group in targets)
    assert {name for name in pools if pools[name] not in ("head", "gateway")} == used, "a pod is empty"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_one_pod_less_does_not_hold_it(example: Path, tmp_path: Path) -> None:
    values = values_of(example)
    values["worker"]["replicas"] -= 1
    pods = pods_of(values)
    with pytest.raises(PlacementError):
        place(resolve(config_of(values, tmp_path), pods), pods)


def test_groups_grow_and_shrink_as_the_file_lets_replicas(tmp_path: Path) -> None:
    one_cpu = Resources(cpus=1)
    drafters = (
        DrafterConfig(name="ngram", options=NgramOptions(), replicas=0, max_replicas=6, resources=one_cpu),
        DrafterConfig(name="fixed", options=NgramOptions(), replicas=2, resources=one_cpu),
    )
    config = Config(drafters=drafters, target=TargetConfig(replicas=2, min_replicas=1, max_replicas=4))
    values = values_for(config)
    (group,) = values["additionalWorkerGroups"].values()
    assert _bounds(values["worker"]) == (1, 2, 4)
    assert _bounds(group) == (2, 2, 6)
    most = (drafters[0].model_copy(update={"replicas": 6}), drafters[1])
    for num_pods, pool in ((2, drafters), (6, most)):
        held = for_cluster(config.model_copy(update={"drafters": pool}))
        place(held, pods_of(values | {"additionalWorkerGroups": {"drafters": group | {"replicas": num_pods}}}))
    assert [problem for manifest in render(values) for problem in problems(manifest)] == []


@pytest.mark.parametrize(("replicas", "most"), [(1, None), (3, None), (2, 5)])
def test_each_replica_of_the_api_has_a_gateway(replicas: int, most: int | None) -> None:
    manifests = render(values_for(Config(api=ApiConfig(replicas=replicas, max_replicas=most))))
    assert [problem for manifest in manifests for problem in problems(manifest)] == []
    service = only(manifests, "RayService")["spec"]
    groups = {group["groupName"]: group for group in service["rayClusterConfig"]["workerGroupSpecs"]}
    assert _bounds(groups["gateway"]) == (replicas, replicas, most or replicas)
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    given = {one["name"]: one.get("num_replicas") for one in application["deployments"]}
    assert given == {"cluster": 1, "api": None if most else replicas}  # `deploy.serve_app.replicas_of` has the bounds


@pytest.mark.parametrize(("drain_s", "grace_s"), [(10, 60), (200.5, 251)])
def test_pods_have_the_time_to_drain(drain_s: float, grace_s: int) -> None:
    service = only(render(values_for(Config(api=ApiConfig(drain_s=drain_s)))), "RayService")["spec"]
    groups = {group["groupName"]: group for group in service["rayClusterConfig"]["workerGroupSpecs"]}
    given = {name: groups[name]["template"]["spec"]["terminationGracePeriodSeconds"] for name in ("gateway", "target")}
    assert given == {"gateway": grace_s, "target": grace_s}


def _bounds(group: dict[str, Any]) -> tuple[int, int, int]:
    return group["minReplicas"], group["replicas"], group["maxReplicas"]


def test_a_file_that_scales_by_its_objectives_does_so_on_pods_that_come_and_go(tmp_path: Path) -> None:
    config = Config(
        target=TargetConfig(max_replicas=2),
        slo=SloConfig(classes={"chat": SloClass(ttft_ms=2000, tpot_ms=40)}, default="chat"),
        scaling=ScalingConfig(policy="outrider", hardware="fixed"),
    )
    found = config_of(values_for(config), tmp_path)
    assert (found.slo, found.scaling) == (config.slo, ScalingConfig(policy="outrider", hardware="elastic"))


def test_secrets_of_the_file_become_files_of_the_pod(tmp_path: Path) -> None:
    given = load(ROOT / "deploy" / "examples" / "multi-node.yaml")
    api = given.api.model_copy(update={"operator_keys_file": Path("operators")})
    values = values_for(given.model_copy(update={"api": api}), Options(secret="mine", model_gb=MODEL_GB))
    config = config_of(values, tmp_path)
    service = only(render(values), "RayService")
    (volume,) = [
        volume
        for volume in service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["volumes"]
        if volume["name"] == "secrets"
    ]
    sources = [source["secret"] for source in volume["projected"]["sources"]]
    mounted = {item["path"]: source["name"] for source in sources for item in source["items"]}
    assert mounted == dict.fromkeys(("api-keys", "operator-keys", "redis-password", "link-token"), "mine") | dict.fromkeys(
        ("tls.crt", "tls.key", "ca.crt"), "mine-tls"
    )
    assert volume["projected"]["defaultMode"] & stat.S_IRWXO == 0, "processes refuse a key that everybody may read"
    state, tls = config.cluster.state, config.cluster.tls
    assert state.url is not None
    assert tls is not None
    named = [config.api.api_keys_file, config.api.operator_keys_file, state.password_file, config.cluster.token_file]
    named += [tls.cert_file, tls.key_file, tls.ca_file]
    assert {str(path) for path in named} == {f"/etc/outrider-secrets/{file}" for file in mounted}


IN_NAMESPACE = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "redis"}}}]


@pytest.mark.parametrize(
    ("url", "port", "to"),
    [
        ("redis://redis", 6379, IN_NAMESPACE),
        ("redis://redis:6380/1", 6380, IN_NAMESPACE),
        (
            "rediss://redis.stores.svc.cluster.local:6390",
            6390,
            [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "stores"}}} | IN_NAMESPACE[0]],
        ),
        ("redis://10.1.2.3:7000", 7000, [{"ipBlock": {"cidr": "10.1.2.3/32"}}]),
        ("redis://[fd00::7]:7000", 7000, [{"ipBlock": {"cidr": "fd00::7/128"}}]),
        ("redis://redis.internal:6381/0", 6381, [{"ipBlock": {"cidr": "0.0.0.0/0"}}]),
    ],
)
def test_the_network_policy_lets_pods_reach_the_redis_of_the_file(
    url: str, port: int, to: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(cluster=ClusterConfig(state=StateConfig(url=url)))
    manifests = render(values_for(config))
    assert [problem for manifest in manifests for problem in problems(manifest)] == []
    (policy,) = [m for m in manifests if m["kind"] == "NetworkPolicy" and m["metadata"]["name"] == "demo-redis"]
    assert policy["spec"]["egress"] == [{"to": to, "ports": [{"protocol": "TCP", "port": port}]}]
    address = only(manifests, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    assert urlsplit(address if "//" in address else f"//{address}").port == port
    assert ("networkPolicy.redis.to" in capsys.readouterr().err) is (to == [{"ipBlock": {"cidr": "0.0.0.0/0"}}])


def test_labels_that_make_the_name_of_another_group_are_refused() -> None:
    options = NgramOptions()
    drafters = [
        DrafterConfig(name=label, options=options, resources=Resources(node_labels={label: "fast"})) for label in ("a", "b")
    ]
    with pytest.raises(InvalidField, match="the name of another group"):
        values_for(Config(drafters=tuple(drafters)))


def test_a_model_that_is_elsewhere_needs_its_size() -> None:
    """Without it a pod would have the memory of the chart's default model, or none."""
    example = ROOT / "deploy" / "examples" / "one-node-8gpu.yaml"
    with pytest.raises(InvalidField, match=r"--model-gb /models/Qwen3-0.6B=GB --model-gb /models/Qwen3-1.7B=GB"):
        values_of(example, model_gb={"/models/Qwen3-14B": 29.5})
    sizes = [f"--model-gb=/models/Qwen3-{size}" for size in ("14B=29.5", "0.6B=1.5", "1.7B=4.1")]
    printed = CliRunner().invoke(app, ["k8s", "render", str(example), *sizes])
    resources = yaml.safe_load(printed.stdout)["worker"]["resources"]
    assert [amounts["memory"] for amounts in resources.values()] == ["34Gi", "34Gi"]


def test_a_gguf_file_has_the_size_of_its_weights_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((1000, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert _weights_on_disk_gb(str(file)) == pytest.approx(1000 * 64 * 2e-9)


@pytest.mark.parametrize("size", ["64", "model=", "model=x", "model=0", "model=inf", "=3"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    result = CliRunner().invoke(
        app, ["k8s", "render", str(ROOT / "deploy" / "examples" / "laptop.yaml"), "--model-gb", size]
    )
    assert result.exit_code == 2
    assert "MODEL=GB" in result.output


def test_labels_of_nodes_select_nodes() -> None:
    """`outrider/pool` names pods. Others are those of Kubernetes nodes: a large target must not land on a small GPU."""
    large = {"outrider/pool": "target", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    small = DrafterConfig(
        name="ngram", options=NgramOptions(), resources=Resources(node_labels={"outrider/pool": "small", "zone": "a"})
    )
    config = Config(target=TargetConfig(resources=Resources(gpus=1, node_labels=large)), drafters=(small,))
    manifests = render(values_for(config))
    assert [problem for manifest in manifests for problem in problems(manifest)] == []
    groups = only(manifests, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    found = {one["labels"]["outrider/pool"]: one["template"]["spec"].get("nodeSelector") for one in groups}
    gpu = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert found == {"target": gpu, "small": {"zone": "a"}, "gateway": None}


def test_a_label_of_ray_is_refused() -> None:
    ours = Resources(node_labels={"ray.io/accelerator-type": "H100"})
    with pytest.raises(InvalidField, match=r"nvidia.com/gpu.product, got .ray.io/accelerator-type"):
        values_for(Config(target=TargetConfig(resources=ours)))


def test_pods_of_drafters_must_not_be_those_of_the_target() -> None:
    shared = Resources(node_labels={"pool": "all"})
    drafter = DrafterConfig(name="ngram", options=NgramOptions(), resources=shared)
    config = Config(drafters=(drafter,))
    config = config.model_copy(update={"target": config.target.model_copy(update={"resources": shared})})
    with pytest.raises(InvalidField, match="node_labels"):
        values_for(config)


def test_the_command_prints_values_and_manifests() -> None:
    laptop = str(ROOT / "deploy" / "examples" / "laptop.yaml")
    values = CliRunner().invoke(app, ["k8s", "render", laptop])
    assert values.exit_code == 0
    assert yaml.safe_load(values.stdout)["worker"]["groupName"] == "target"
    manifests = CliRunner().invoke(app, ["k8s", "render", laptop, "--manifest", "--name", "mine"])
    assert manifests.exit_code == 0
    assert only(documents(manifests.stdout), "RayService")["metadata"]["name"] == "mine"


def test_a_file_with_a_typo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("target: {replica: 2}")
    result = CliRunner().invoke(app, ["k8s", "render", str(tmp_path / "file.yaml")])
    assert result.exit_code == 1
    assert "replicas" in result.output
