"""Which pods the chart's policies, budgets and monitors select."""

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import CHART, INCREMENTAL, Manifest, matches, only, pod_templates, port_names, render, role

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
        taken = [pod for pod in pods_beside_others(manifests) if matches(selector, pod)]
        found[name] = set(map(_whose, taken))
        for endpoint in manifest["spec"].get("podMetricsEndpoints", ()):
            kept = [pod for pod in taken if endpoint["port"] in port_names(pod) and _is_kept(endpoint, pod)]
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
    return role(pod) if matches(OWN, pod) else "another's"


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
        taken = {role(pod) for pod in pods if matches(policy["podSelector"]["matchLabels"], pod)}
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
    (rule,) = [rule for rule in whole["spec"]["egress"] if "ports" in rule]
    # OpenShift's DNS listens at 5353.
    assert rule["ports"] == [{"protocol": one, "port": port} for port in (53, 5353) for one in ("UDP", "TCP")]
    namespaces = [peer["namespaceSelector"]["matchLabels"] for peer in rule["to"] if "namespaceSelector" in peer]
    assert [set(labels.values()) for labels in namespaces] == [{"kube-system"}, {"openshift-dns"}]
    assert [peer["ipBlock"]["cidr"] for peer in rule["to"] if "ipBlock" in peer] == ["169.254.20.10/32"], (
        "NodeLocal DNSCache"
    )


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
