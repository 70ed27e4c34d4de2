"""Dashboards and alerts: their queries select series that exist, and a typo in one is found."""

import json
import re

import pytest
import yaml

from deploy.api.metric_table import METRICS
from deploy.grafana import CLUSTER, dashboard
from tests.support.manifests import CHART, ROOT, only, render
from tests.support.queries import faults


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
    labels = only(render({"podMonitor": {"enabled": True}}), "PodMonitor")["spec"]["podTargetLabels"]
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
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    rules = only(render({"alerts": {"enabled": True}}), "PrometheusRule")["spec"]["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert["alert"] for alert in alerts()]
    anchors = {heading.lower() for heading in headings}
    assert {rule["annotations"]["runbook_url"].partition("#")[2] for rule in rules} <= anchors
