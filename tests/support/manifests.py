"""Validates Kubernetes manifests without a cluster: unknown fields and wrong types are errors."""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import helm_python as helm
import kubernetes_validate
import yaml
from jsonschema import Draft7Validator
from kubernetes_validate import utils
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from cluster.config import Config
from cluster.strict_yaml import parse
from deploy.ray_service import Arguments

ROOT = Path(__file__).parents[2]
CHART = ROOT / "k8s" / "chart"
CRDS = ROOT / "tests" / "data" / "kuberay"
KUBERNETES = "1.34"
Manifest = dict[str, Any]
utils.schema_contents = cache(utils.schema_contents)  # megabytes of JSON, else read for each manifest
INCREMENTAL: dict[str, Any] = {
    "upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": {"gatewayClassName": "istio"}}
}

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = {
    "type": "object",
    "properties": {"matchLabels": _TEXTS},
    "required": ["matchLabels"],
    "additionalProperties": False,
}


def _fields(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


_RELABELING = {
    "anyOf": [
        _fields("sourceLabels action", sourceLabels={"type": "array"}, regex=_TEXT, action={"enum": ["keep", "drop"]}),
        _fields("regex action", regex=_TEXT, action={"enum": ["labeldrop"]}),
        _fields("targetLabel replacement", targetLabel=_TEXT, replacement=_TEXT),
    ]
}
_ENDPOINT = _fields("port", port=_TEXT, path=_TEXT, interval=_TEXT, relabelings={"type": "array", "items": _RELABELING})
_ALERT = _fields(
    "alert expr for labels annotations", **dict.fromkeys(("alert", "expr", "for"), _TEXT), labels=_TEXTS, annotations=_TEXTS
)
_RULES = _fields("name rules", name=_TEXT, rules={"type": "array", "items": _ALERT})
# The fields of the Prometheus operator's resources that the chart uses.
_MONITORING = {
    "PodMonitor": _fields(
        "selector podMetricsEndpoints",
        selector=_SELECTOR,
        podTargetLabels={"type": "array", "items": _TEXT},
        podMetricsEndpoints={"type": "array", "items": _ENDPOINT},
    ),
    "PrometheusRule": _fields("groups", groups={"type": "array", "items": _RULES}),
}


def render(values: dict[str, Any] | None = None, chart: Path = CHART) -> list[Manifest]:
    """What `helm template` renders. Raises HelmError: the values do not fit the chart, or a template fails."""
    with helm.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        rendered = loaded.render(values, name="demo", namespace="llm")
    return [document for name, text in sorted(rendered.items()) if name.endswith(".yaml") for document in documents(text)]


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.load_all(text, _UniqueKeys) if document is not None]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def problems(manifest: Manifest) -> list[str]:
    """What is wrong with a manifest of any kind that the project writes."""
    group, kind = str(manifest.get("apiVersion")).rpartition("/")[0], str(manifest.get("kind"))
    if group == "ray.io":
        found = _broken(custom_resource(kind), manifest) + _metadata_problems(manifest)
        return found + (serve_problems(manifest) if kind == "RayService" and not found else [])
    if group == "monitoring.coreos.com" and kind in _MONITORING:
        whole = _fields(
            "apiVersion kind metadata spec",
            apiVersion={"const": "monitoring.coreos.com/v1"},
            kind={},
            metadata={},
            spec=_MONITORING[kind],
        )
        return _broken(Draft7Validator(whole), manifest) + _metadata_problems(manifest)
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError, KeyError) as error:
        return [f"{kind}: {error}"]
    return []


def serve_problems(manifest: Manifest) -> list[str]:
    """Of a RayService's applications, by Ray's schema; of the builder's arguments, and of the mounted file."""
    try:
        written = yaml.load(manifest["spec"]["serveConfigV2"], _UniqueKeys)
        schema = ServeDeploySchema.model_validate(written)
        if unknown := sorted(_unknown(ServeDeploySchema, written)):  # which Ray ignores in options of actors
            return [f"serveConfigV2: unknown {', '.join(unknown)}"]
        for application in schema.applications:
            Arguments.model_validate(application.args)
        parse(served_file(manifest), Config, "the annotation outrider/config")
    except (ValueError, KeyError) as error:  # of pydantic, and of the file
        return [f"serveConfigV2: {error}"]
    return []


def served_file(ray_service: Manifest) -> str:
    """The file of `outrider serve`, which the gateway's pods hold."""
    annotated = [
        template["metadata"].get("annotations", {}).get("outrider/config") for template in pod_templates(ray_service)
    ]
    (text,) = [text for text in annotated if text is not None]
    return str(text)


def _unknown(model: Any, written: Any) -> Iterator[str]:
    """Keys that are fields of none of a pydantic model's parts."""
    if isinstance(written, list):
        for part in written:
            yield from _unknown(model, part)
    models = [model, *get_args(model), *(arg for part in get_args(model) for arg in get_args(part))]
    fields = {k: v for m in models if isinstance(m, type) and issubclass(m, BaseModel) for k, v in m.model_fields.items()}
    if isinstance(written, dict) and fields:
        yield from written.keys() - fields.keys()
        for key in written.keys() & fields.keys():
            yield from _unknown(fields[key].annotation, written[key])


def pod_templates(ray_service: Manifest) -> list[Manifest]:
    cluster = ray_service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def role(template: Manifest) -> str:
    return str(template["metadata"]["labels"]["outrider/role"])


def matches(labels: dict[str, str], template: Manifest) -> bool:
    return labels.items() <= dict(template["metadata"]["labels"]).items()


def port_names(template: Manifest) -> set[str]:
    return {port["name"] for port in template["spec"]["containers"][0]["ports"]}


@cache
def custom_resource(kind: str) -> Draft7Validator:
    """A validator of version v1 of KubeRay's resource, which refuses unknown fields."""
    with gzip.open(CRDS / f"ray.io_{kind.lower()}s.yaml.gz") as file:
        definition = yaml.load(file, yaml.CSafeLoader)
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"] |= {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": kind}}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    _close(schema)
    return Draft7Validator(schema)


def _close(schema: Any) -> None:
    """Forbids unknown fields in every object with known ones. Kubernetes would drop them silently."""
    if isinstance(schema, list):
        for part in schema:
            _close(part)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            _close(part)


def _metadata_problems(manifest: Manifest) -> list[str]:
    """A custom resource's metadata is that of a core resource."""
    stand_in = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest.get("metadata")}
    return problems(stand_in)


def _broken(validator: Draft7Validator, manifest: Manifest) -> list[str]:
    errors = validator.iter_errors(json.loads(json.dumps(manifest)))
    return [f"{manifest.get('kind')}: {error.json_path}: {error.message[:300]}" for error in errors]


class _UniqueKeys(yaml.CSafeLoader):
    """Refuses a mapping with a key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"keys used twice: {sorted(twice)} {node.start_mark}")
        return dict(super().construct_mapping(node, deep))


# Keys under these names are free: labels, quantities, file names.
FREE = {
    "labels",
    "annotations",
    "matchLabels",
    "limits",
    "requests",
    "data",
    "stringData",
    "rayStartParams",
    "nodeSelector",
    "podLabels",
}


def typos(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """The manifest with one field misspelt, for each field: its path, and the manifest."""
    for path in _paths(manifest):
        copied = json.loads(json.dumps(manifest))
        owner = copied
        for key in path[:-1]:
            owner = owner[key]
        owner[f"{path[-1]}Typo"] = owner.pop(path[-1])
        yield ".".join(map(str, path)), copied


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, list):
        for i, part in enumerate(value):
            yield from _paths(part, (*path, i))
    elif isinstance(value, dict) and not (path and path[-1] in FREE):
        for key, part in value.items():
            yield (*path, key)
            yield from _paths(part, (*path, key))
