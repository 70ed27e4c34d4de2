"""The Grafana dashboard of the chart, made from the table of metrics: a panel for each, and those that relate several."""

import json
from collections.abc import Sequence
from typing import Any

from deploy.api.metric_table import METRICS, Metric

PREFIX = "outrider_"
WIDTH, HEIGHT = 12, 8  # of a panel; a row of the grid has 24 columns
RANGE = "[$__rate_interval]"
QUANTILES = ("0.5", "0.95", "0.99")


def dashboard() -> str:
    """JSON, as Grafana's sidecar reads it from a ConfigMap."""
    rows = [
        ("Speculation, by drafter", _speculation()),
        ("Requests", [_panel(m) for m in METRICS if not m.name.startswith(("target_", "drafter_"))]),
        ("Targets", [_panel(m) for m in METRICS if m.name.startswith("target_")]),
        ("Drafters", [_panel(m) for m in METRICS if m.name.startswith("drafter_")]),
    ]
    panels, y = [], 0
    for title, row in rows:
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, 2 * WIDTH, 1)})
        for i, panel in enumerate(row):
            place = _place(i % 2 * WIDTH, y + 1 + i // 2 * HEIGHT, WIDTH, HEIGHT)
            panels.append(panel | {"gridPos": place})
        y += 1 + -(-len(row) // 2) * HEIGHT
    numbered = [panel | {"id": number} for number, panel in enumerate(panels, start=1)]
    document = {
        "title": "Outrider",
        "uid": "outrider",
        "tags": ["outrider"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": numbered,
    }
    return json.dumps(document, indent=1) + "\n"


def _speculation() -> list[dict[str, Any]]:
    """What relates several metrics, and so follows from no single row of the table."""
    accepted, verified = f"rate(outrider_drafter_accepted_total{RANGE})", f"rate(outrider_drafter_verified_total{RANGE})"
    at_accepted, at_verified = (f"rate(outrider_draft_tokens_{what}_total{RANGE})" for what in ("accepted", "verified"))
    drafts = f"rate(outrider_drafts_verified_total{RANGE})"
    acceptance = f"sum by (drafter) ({accepted}) / sum by (drafter) ({verified})"
    return [
        _graph("Acceptance", "Accepted over verified draft tokens.", "percentunit", [(acceptance, "{{drafter}}")]),
        _graph(
            "Acceptance by position",
            "Accepted over verified draft tokens, by position in the draft from 0.",
            "percentunit",
            [(f"sum by (position) ({at_accepted}) / sum by (position) ({at_verified})", "{{position}}")],
        ),
        _graph(
            "Accepted length",
            "Tokens of a pass that verified a draft, the bonus token included.",
            "short",
            [(f"1 + sum({at_accepted}) / sum({drafts})", "mean")],
        ),
        _graph(
            "Draft tokens per second",
            "Verified, and of these accepted; the difference is wasted verification.",
            "short",
            [
                (f"sum by (drafter) ({verified})", "{{drafter}} verified"),
                (f"sum by (drafter) ({accepted})", "{{drafter}} accepted"),
            ],
        ),
    ]


def _panel(metric: Metric) -> dict[str, Any]:
    """The rate of a counter, the value of a gauge, quantiles of a histogram."""
    name, by = PREFIX + metric.name, f" by ({', '.join(metric.labels)})" if metric.labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    unit = "s" if metric.name.endswith("_seconds") else "bytes" if metric.name.endswith("_bytes") else "short"
    if metric.kind == "counter":
        queries = [(f"sum{by} (rate({name}_total{RANGE}))", legend or "per second")]
    elif metric.kind == "gauge":
        queries = [(f"{'avg' if metric.mean else 'sum'}{by} ({name})", legend or "value")]
    else:
        labels = ", ".join((*metric.labels, "le"))
        buckets = f"sum by ({labels}) (rate({name}_bucket{RANGE}))"
        queries = [(f"histogram_quantile({q}, {buckets})", f"{legend} p{float(q) * 100:g}".strip()) for q in QUANTILES]
    return _graph(metric.name.replace("_", " ").capitalize(), metric.text, unit, queries)


def _graph(title: str, text: str, unit: str, queries: Sequence[tuple[str, str]]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": source}
            for i, (query, legend) in enumerate(queries)
        ],
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


if __name__ == "__main__":  # python -m deploy.k8s.dashboard >k8s/chart/dashboards/outrider.json
    print(dashboard(), end="")
