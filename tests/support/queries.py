"""Checks PromQL queries against the metrics that the API exports: names, labels, and values of labels."""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import promql_parser as promql

from cluster.counts import SloCounts
from cluster.types import FinishReason
from deploy.api.metric_table import METRICS, objective_counts
from deploy.api.metrics import REPLICA
from deploy.grafana import CLUSTER
from tests.support.metrics import exported

SCRAPED = {"namespace", "job", "instance", "outrider_role", CLUSTER, REPLICA}  # labels of every series
# By label. A query that selects by another label is a fault until that label's values are given here.
VALUES = {
    "finished_reason": {str(reason) for reason in FinishReason},
    "outcome": {labels[-1] for labels in objective_counts(SloCounts("any"))},
    "resource": {"cpu", "gpu"},
    "status": {str(status.value) for status in HTTPStatus},
}


def faults(query: str, legend: str = "") -> list[str]:
    """Of a query, and of a text with labels of its result in it. Raises ValueError: the query is no PromQL."""
    found: list[str] = []
    labels = _labels(promql.parse(query), found)
    named = re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", legend)
    return found + [f"no label {name} in the result" for name in named if name not in (labels or ())]


def _labels(expr: Any, found: list[str]) -> set[str] | None:
    """Labels that the result may have; None: a scalar. Adds faults to ``found``."""
    match expr:
        case promql.VectorSelector():
            return _selected(expr, found)
        case promql.MatrixSelector():
            return _selected(expr.vector_selector, found)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(expr.expr, found)
        case promql.AggregateExpr():
            inner = _labels(expr.expr, found) or set()
            given = set(expr.modifier.labels) if expr.modifier else set()
            found += [f"no label {name} to aggregate by" for name in sorted(given - inner)]
            without = expr.modifier is not None and expr.modifier.type == promql.AggModifierType.Without
            return inner - given if without else given
        case promql.Call():
            parts = [_labels(arg, found) for arg in expr.args]
            if expr.func.return_type == promql.ValueType.Scalar:
                return None
            vector = set().union(*(part for part in parts if part is not None))
            if expr.func.name == "histogram_quantile":
                found += [] if "le" in vector else ["a quantile without the label le"]
                return vector - {"le"}
            return set() if expr.func.name == "absent" else vector
        case promql.BinaryExpr():
            left, right = _labels(expr.lhs, found), _labels(expr.rhs, found)
            if left is None or right is None:
                return right if left is None else left
            if expr.modifier and (expr.modifier.matching or expr.modifier.group_labels):
                found.append("vector matching by named labels is not checked")
            if left != right and str(expr.op) != "or":
                found.append(f"sides that never match: {sorted(left)} and {sorted(right)}")
            return left | right
    return None


def _selected(selector: Any, found: list[str]) -> set[str]:
    if selector.name not in exported():
        found.append(f"no metric {selector.name}")
        return set(SCRAPED)
    stem = re.sub(r"_(total|bucket|sum|count)$", "", selector.name)
    labels = SCRAPED | {"le"} if selector.name.endswith("_bucket") else set(SCRAPED)
    labels.update(*(metric.labels for metric in METRICS if f"outrider_{metric.name}" in (stem, selector.name)))
    found += _unmatched(selector, labels)
    return labels


def _unmatched(selector: Any, labels: set[str]) -> Iterator[str]:
    for matcher in selector.matchers.matchers:
        if matcher.name not in labels:
            yield f"no label {matcher.name} in {selector.name}"
        elif matcher.op not in (promql.MatchOp.Equal, promql.MatchOp.NotEqual) or matcher.name not in VALUES:
            yield f"values of {matcher.name} are not checked"
        elif matcher.value not in VALUES[matcher.name]:
            yield f"no value {matcher.value} of {matcher.name}"
