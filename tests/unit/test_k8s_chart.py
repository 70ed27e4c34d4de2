"""The Helm chart: every manifest that it renders is valid, and a typo in any of its files is found."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from cluster.config import load
from cluster.transport.tls import NODE_NAME
from deploy.k8s.kustomize import MODEL_GB
from deploy.k8s.render import Options, values_for
from deploy.ray_service import Arguments, app
from tests.support.manifests import (
    CHART,
    INCREMENTAL,
    ROOT,
    Manifest,
    documents,
    matches,
    only,
    pod_templates,
    port_names,
    problems,
    render,
    role,
    typos,
)

EVERYTHING: dict[str, Any] = {
    "modelSpec": {"config": {"model": {"name": "/models/big"}}, "volume": {"claimName": "models", "mountPath": "/models"}},
    "imagePullSecrets": [{"name": "registry"}],
    "secrets": {
        name: {"name": "outrider", "key": name.lower()} for name in ("apiKeys", "operatorKeys", "redisPassword", "linkToken")
    }
    | {"tls": {"name": "outrider-tls"}},
    "authOptions": {"secretName": "ray-token"},
    "gcsFaultTolerance": {
        "enabled": True,
        "redisAddress": "redis:6379",
        "redisPassword": {"name": "redis", "key": "password"},
        "externalStorageNamespace": "outrider",
    },
    "service": {"annotations": {"example.com/internal": "true"}},
    "common": {"containerEnv": [{"name": "OUTRIDER_CPU", "value": "avx2"}], "podLabels": {"team": "inference"}},
    "worker": {
        "replicas": 3,
        "minReplicas": 2,
        "maxReplicas": 8,
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"outrider/role": "target"}},
            }
        ],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
        "envFrom": [{"secretRef": {"name": "hub"}}],
        "initContainers": [{"name": "first", "image": "busybox:1"}],
        "sidecarContainers": [{"name": "beside", "image": "busybox:1"}],
        "annotations": {"example.com/note": "1"},
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
    },
    "networkPolicy": {
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"protocol": "TCP", "port": 443}]}]
    },
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
    "grafanaDashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}, "data": {"a": "b"}},
        'apiVersion: v1\nkind: Secret\nmetadata:\n  name: {{ include "outrider.name" . }}-more\nstringData: {a: b}',
    ],
}
KINDS = (
    "ConfigMap",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "PodMonitor",
    "PrometheusRule",
    "RayService",
    "Secret",
    "ServiceAccount",
)
# A typo in each of very many fields of a RayService would take minutes.
MAX_TYPOS = 12


@pytest.fixture(scope="module")
def everything() -> list[Manifest]:
    return render(EVERYTHING)


@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, INCREMENTAL, {"networkPolicy": {"enabled": False}, "autoscaling": {"enabled": False}}]
)
def test_all_manifests_are_valid(values: dict[str, Any]) -> None:
    manifests = render(values)
    assert [problem for manifest in manifests for problem in problems(manifest)] == []
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(names)) == len(names)


def test_helm_finds_no_fault() -> None:
    report = helm.lint(CHART, EVERYTHING, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_field_is_found(everything: list[Manifest], kind: str) -> None:
    """In each kind, and in the fields that nothing else would notice."""
    assert {manifest["kind"] for manifest in everything} == set(KINDS)
    one = next(manifest for manifest in everything if manifest["kind"] == kind)
    misspelt = list(typos(one))
    chosen = misspelt[:: -(-len(misspelt) // MAX_TYPOS)]
    assert [path for path, manifest in chosen if not problems(manifest)] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import_path:", "import_paht:"),
        ("config_file:", "config_fiel:"),
        ("num_replicas: 1", "num_replicas: one"),
        ("label_selector:", "label_selctor:"),
        ("proxy_location: EveryNode", "proxy_location: EverywhereNode"),
        ("enable_access_log:", "enable_acces_log:"),
    ],
)
def test_a_typo_in_serves_configuration_is_found(everything: list[Manifest], old: str, new: str) -> None:
    service = json.loads(json.dumps(only(everything, "RayService")))
    assert old in service["spec"]["serveConfigV2"]
    service["spec"]["serveConfigV2"] = service["spec"]["serveConfigV2"].replace(old, new, 1)
    assert problems(service) != []


def test_a_typo_in_the_served_file_is_found() -> None:
    service = only(render({"modelSpec": {"config": {"modle": {"name": "smollm2-135m"}}}}), "RayService")
    assert "did you mean" in "".join(problems(service)) or "modle" in "".join(problems(service))


@pytest.mark.parametrize(
    "values",
    [
        {"imagee": {}},
        {"image": {"repo": "x"}},
        {"worker": {"replica": 2}},
        {"worker": {"resources": {"limit": {}}}},
        {"additionalWorkerGroups": {"gateway": {"serve": True}}},
        {"additionalWorkerGroups": {"Upper": {}}},
        {"modelSpec": {"model": "x"}},
        {"upgradeStrategy": {"type": "Recreate"}},
        {"networkPolicy": {"dsn": []}},
        {"grafanaDashboards": {"enable": True}},
        {"secrets": {"tls": {"name": "outrider-tls", "key": "tls.crt"}}},
        {"upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade"}},
        {"gcsFaultTolerance": {"enabled": True}},
    ],
    ids=json.dumps,
)
def test_values_that_the_chart_does_not_know_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render(values)


@pytest.mark.parametrize("template", sorted(path.name for path in (CHART / "templates").iterdir()))
def test_a_template_that_does_not_close_is_found(template: str, tmp_path: Path) -> None:
    shutil.copytree(CHART, chart := tmp_path / "chart")
    file = chart / "templates" / template
    text = file.read_text()
    file.write_text(text.replace("{{- end }}", "", 1) if "{{- end }}" in text else text + "{{ .Values")
    with pytest.raises(helm.HelmError):
        render(EVERYTHING, chart)


def test_pods_are_confined(everything: list[Manifest]) -> None:
    """No root, no writable root file system, no token of the API server but the autoscaler's, three probes."""
    service = only(everything, "RayService")
    for template in pod_templates(service):
        spec = template["spec"]
        is_head = template["metadata"]["labels"]["outrider/role"] == "head"
        assert spec["automountServiceAccountToken"] is is_head
        assert spec["securityContext"]["runAsNonRoot"] is True
        containers = [c for c in (*spec["containers"], *spec["initContainers"]) if c["image"].startswith("outrider")]
        for container in (*containers, *([service["spec"]["rayClusterConfig"]["autoscalerOptions"]] if is_head else [])):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= spec["containers"][0].keys()


def test_secrets_are_references(everything: list[Manifest]) -> None:
    """The chart itself renders none; the one here is an extra object."""
    assert [m["metadata"]["name"] for m in everything if m["kind"] == "Secret"] == ["demo-more"]
    text = yaml.safe_dump(only(everything, "RayService"))
    assert "secretKeyRef" in text
    assert not re.search(r"(?i)password:\s*\w+$", text, re.MULTILINE)


def test_the_certificate_of_the_docs_is_that_of_the_pods() -> None:
    (example,) = re.findall(r"```yaml\n(extraObjects:.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    values = values_for(load(ROOT / "deploy" / "examples" / "multi-node.yaml"), Options(model_gb=MODEL_GB))
    certificate = only(render(values | yaml.safe_load(example)), "Certificate")
    assert certificate["spec"]["secretName"] == values["secrets"]["tls"]["name"]
    assert certificate["spec"]["dnsNames"] == [NODE_NAME]


def test_only_the_gateway_is_served() -> None:
    """KubeRay's service selects all ready workers, so that the port's name must tell them apart."""
    service = only(render({"service": {"port": 80}}), "RayService")
    assert service["spec"]["serveService"]["spec"]["ports"] == [{"name": "serve", "port": 80, "targetPort": "serve"}]
    workers = pod_templates(service)[1:]
    assert [role(template) for template in workers if "serve" in port_names(template)] == ["gateway"]
    assert [role(template) for template in workers if not _is_ready_on_its_own(template)] == ["gateway"]


def test_an_incremental_upgrade_serves_only_the_gateway() -> None:
    """KubeRay ignores `serveService` there: its own service selects all ready workers, by the number of the port."""
    service = only(render(INCREMENTAL), "RayService")
    assert "serveService" not in service["spec"]
    head, *workers = pod_templates(service)
    assert [port["containerPort"] for port in head["spec"]["containers"][0]["ports"] if port["name"] == "serve"] == [8000]
    assert [role(template) for template in workers if _is_ready_on_its_own(template)] == []


@pytest.mark.parametrize(
    ("values", "words"), [({}, "Service demo, port 8000"), (INCREMENTAL, "get gateway/demo-gateway")], ids=["new", "steps"]
)
def test_the_notes_name_what_clients_reach(values: dict[str, Any], words: str) -> None:
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(values, name="demo", namespace="llm")
    notes = rendered["outrider/templates/NOTES.txt"]
    assert words in notes
    assert ("Service demo" in notes) is ("serveService" in only(render(values), "RayService")["spec"])
    (selector,) = re.findall(r"--selector (\S+)", notes)
    wanted = dict(part.split("=") for part in selector.split(","))
    assert [role(t) for t in pod_templates(only(render(values), "RayService")) if matches(wanted, t)] == ["gateway"]


def test_a_change_of_the_file_changes_the_pods() -> None:
    """So that KubeRay starts a new cluster beside the old one, and does not restart the old one in place."""
    one, other = (
        only(render({"modelSpec": {"config": {"model": {"max_model_len": length}}}}), "RayService")["spec"]
        for length in (1024, 2048)
    )
    assert one["serveConfigV2"] == other["serveConfigV2"]
    assert one["rayClusterConfig"] != other["rayClusterConfig"]


def test_the_application_has_the_deployments_that_the_chart_configures(tmp_path: Path) -> None:
    (application,) = yaml.safe_load(only(render(), "RayService")["spec"]["serveConfigV2"])["applications"]
    (tmp_path / "config.yaml").write_text("drafters: []")
    built = app(Arguments(config_file=tmp_path / "config.yaml"))
    selectors = [deployment["ray_actor_options"]["label_selector"] for deployment in application["deployments"]]
    # Ray builds the application on the nodes that all of its deployments select: there the file is mounted.
    assert selectors == [{"outrider/pool": "gateway"}] * len(selectors)
    names, pending = set(), [built]
    while pending:
        one = pending.pop()
        names.add(one._bound_deployment.name)
        pending += [arg for arg in one._bound_deployment.init_args if hasattr(arg, "_bound_deployment")]
    assert names == {deployment["name"] for deployment in application["deployments"]}


def test_documents_with_a_key_twice_are_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="twice"):
        documents("a: 1\na: 2\n")


def _is_ready_on_its_own(template: Manifest) -> bool:
    """Whether Ray's agent alone makes it ready."""
    return "/api/healthz" in json.dumps(template["spec"]["containers"][0]["readinessProbe"])
