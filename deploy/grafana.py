"""The Grafana dashboard, made from the table of metrics: a panel for each, and those that relate several."""

import json
from collections.abc import Sequence
from typing import Any

from deploy.api.metric_table import METRICS, Metric

PREFIX = "outrider_"
WIDTH, HEIGHT = 12, 8  # of a panel; a row of the grid has 24 columns
RANGE = "[$__rate_interval]"
TIMESTAMP_TITLES = {"tls_not_after_timestamp_seconds": "Time until a certificate for links expires"}  # by metric
CLUSTER = "ray_io_cluster"  # the label by which the PodMonitor tells two clusters apart during an upgrade; else empty
QUANTILES = ("0.5", "0.95", "0.99")


def dashboard() -> str:
    """JSON, as Grafana's sidecar reads it from a ConfigMap."""
    rows = [
        ("Speculation, by drafter", _speculation()),
        ("Effect, objectives and cost", _effects()),
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
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *map(_price, ("gpu", "cpu")),
            ]
        },
        "panels": numbered,
    }
    return json.dumps(document, indent=1) + "\n"


def _price(resource: str) -> dict[str, Any]:
    """A number that the reader of the dashboard sets."""
    zero = {"text": "0", "value": "0"}
    label = f"Price of a {resource.upper()} hour"
    return {"name": f"{resource}_hour", "type": "textbox", "label": label, "query": "0", "current": zero, "options": [zero]}


def _of(metric: str, by: str = "drafter") -> str:
    """The summed rate of a counter."""
    return f"sum by ({by}) (rate({PREFIX}{metric}{RANGE}))"


def _ratio(part: str, whole: str, by: str = "drafter") -> str:
    return f"{_of(part, by)} / {_of(whole, by)}"


def _mean(histogram: str) -> str:
    return _ratio(f"drafter_{histogram}_sum", f"drafter_{histogram}_count")


def _speculation() -> list[dict[str, Any]]:
    """What relates several metrics of drafters, and so follows from no single row of the table."""
    accepted = _ratio("drafter_accepted_total", "drafter_verified_total")
    at_position = _ratio("drafter_position_accepted_total", "drafter_position_verified_total", "drafter, position")
    in_domain = _ratio("domain_tokens_accepted_total", "domain_tokens_verified_total", "drafter, domain")
    late = _ratio("drafter_holds_expired_total", "drafter_hold_seconds_count")
    return [
        _graph(
            "Who drafts for how many requests",
            "Requests by the drafter that they are assigned to.",
            "short",
            [("sum by (drafter) (outrider_drafter_requests)", "{{drafter}}")],
        ),
        _graph("Acceptance", "Accepted over verified draft tokens.", "percentunit", [(accepted, "{{drafter}}")]),
        _graph(
            "Acceptance by position",
            "Accepted over verified draft tokens, by position in the draft from 0.",
            "percentunit",
            [(at_position, "{{drafter}} at {{position}}")],
        ),
        _graph(
            "Acceptance by domain",
            "Accepted over verified draft tokens, by the domain of the call.",
            "percentunit",
            [(in_domain, "{{drafter}} on {{domain}}")],
        ),
        _graph(
            "Lengths",
            "Mean tokens of a proposal, verified of a draft, and accepted of it.",
            "short",
            [(_mean(f"{what}_length"), f"{{{{drafter}}}} {what}") for what in ("drafted", "verified", "accepted")],
        ),
        _graph(
            "Draft tokens per second",
            "Verified, and of these accepted.",
            "short",
            [(_of(f"drafter_{what}_total"), f"{{{{drafter}}}} {what}") for what in ("verified", "accepted")],
        ),
        _graph(
            "Wasted verification", "Share of the verified draft tokens.", "percentunit", [(f"1 - {accepted}", "{{drafter}}")]
        ),
        _graph(
            "Requests that wait for a proposal",
            "Seconds that requests waited, per second: the mean number that wait.",
            "short",
            [(_of("drafter_hold_seconds_sum"), "{{drafter}}")],
        ),
        _graph("Waits in vain", "Share of waits that ended without the proposal.", "percentunit", [(late, "{{drafter}}")]),
        _graph(
            "Proposals that do not count",
            "Per second: too late, sessions opened anew, and messages with invalid parts.",
            "short",
            [(_of(f"drafter_{what}_total"), f"{{{{drafter}}}} {what}") for what in ("stale", "resyncs", "unsound")],
        ),
    ]


def _effects() -> list[dict[str, Any]]:
    drafting = "target_decode_seconds_total", "target_plain_decode_seconds_total", "target_rejected_row_seconds_total"
    decode, plain, rejected = (_of(name, "target") for name in drafting)
    objectives = "sum by (slo_class, objective) (rate(outrider_slo_objectives_total"
    met = f'{objectives}{{outcome="met"}}{RANGE})) / {objectives}{RANGE}))'
    reserved = {one: f'sum(outrider_reserved_resources{{resource="{one}"}})' for one in ("gpu", "cpu")}
    price = f"({reserved['gpu']} * $gpu_hour + {reserved['cpu']} * $cpu_hour) / 3600"
    return [
        _graph(
            "Speed-up over no drafting",
            "Predicted time of the same decoding without drafts, over its time with drafts.",
            "none",
            [(f"{plain} / {decode}", "{{target}}")],
        ),
        _graph(
            "Time lost to rejected drafts",
            "Share of the time of decoding.",
            "percentunit",
            [(f"{rejected} / {decode}", "{{target}}")],
        ),
        _graph(
            "Attainment",
            "Share of answers that met the objective of their class.",
            "percentunit",
            [(met, "{{slo_class}} {{objective}}")],
        ),
        _graph(
            "Cost of a million tokens",
            "Of all reserved CPUs and GPUs, at the prices of an hour that are set above.",
            "none",
            [(f"1e6 * {price} / sum(rate(outrider_completion_tokens_total{RANGE}))", "cost")],
        ),
    ]


def _panel(metric: Metric) -> dict[str, Any]:
    """The rate of a counter, the value of a gauge, the time left until the first of timestamps, quantiles of a histogram."""
    name, by = PREFIX + metric.name, f" by ({', '.join(metric.labels)})" if metric.labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    title, text = metric.name.replace("_", " ").capitalize(), metric.text
    unit = "s" if metric.name.endswith("_seconds") else "bytes" if metric.name.endswith("_bytes") else "short"
    if metric.kind == "counter":
        queries = [(f"sum{by} (rate({name}_total{RANGE}))", legend or "per second")]
    elif metric.name.endswith("_timestamp_seconds"):
        what = text.removeprefix("POSIX time at which ").replace(" expires.", ".", 1)
        title, text = TIMESTAMP_TITLES[metric.name], f"Seconds until the first of these expires: {what}"
        queries = [(f"min{by} ({name}) - time()", legend or "time left")]
    elif metric.kind == "gauge":
        by = f" by ({', '.join((*metric.labels, CLUSTER))})"
        queries = [(f"{'avg' if metric.mean else 'sum'}{by} ({name})", f"{legend or 'value'} {{{{{CLUSTER}}}}}")]
    else:
        labels = ", ".join((*metric.labels, "le"))
        buckets = f"sum by ({labels}) (rate({name}_bucket{RANGE}))"
        queries = [(f"histogram_quantile({q}, {buckets})", f"{legend} p{float(q) * 100:g}".strip()) for q in QUANTILES]
    return _graph(title, text, unit, queries)


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
