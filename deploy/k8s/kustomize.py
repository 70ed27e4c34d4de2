"""The kustomize base and overlays, made from the chart and the example files: overlays are patches of the base."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.config import load
from deploy.k8s.render import CHART, Options, manifest, values_for
from drafters.shipped import with_shipped

RELEASE = "outrider"
BASE = ("laptop", "0.1.0")
# The example that an overlay deploys, and the tag of its image.
OVERLAYS = {
    "laptop-cpu": BASE,
    "one-node": ("one-node-8gpu", "0.1.0-cuda"),
    "gpu-pool": ("multi-node", "0.1.0-cuda"),
    "vllm-target": ("vllm-4gpu", "0.1.0-vllm"),
}
# GB of the weights of the models in the examples, in bfloat16.
MODEL_GB = {
    "/models/Qwen3-32B-eagle3": 2.0,
    "/models/Qwen3-32B-dspark": 3.0,
    "/models/Qwen3-32B": 65.5,
    "/models/Qwen3-14B": 29.5,
    "/models/Qwen3-4B": 8.1,
    "/models/Qwen3-1.7B": 4.1,
    "/models/Qwen3-0.6B": 1.5,
}
NOTE = (
    "# Made by `python -m deploy.k8s.kustomize` from deploy/examples/{example}.yaml. Patch it in an overlay of your own.\n"
)
# Of the pods of `laptop-cpu`, for a machine of 4 CPUs and 16 GiB: 2.7 CPUs and 10.5 GiB with the autoscaler beside the head.
LAPTOP_REQUESTS = {
    "head": {"cpu": "500m", "memory": "2Gi"},
    "gateway": {"cpu": "500m", "memory": "2Gi"},
    "target": {"cpu": "1", "memory": "4Gi"},
    "drafter-ngram": {"cpu": "250m", "memory": "1Gi"},
    "drafter-suffix": {"cpu": "250m", "memory": "1Gi"},
}
NAMESPACE = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": RELEASE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
}
_HELMS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
Manifest = dict[str, Any]


def files() -> dict[str, str]:
    """All files by their path under `k8s`."""
    base = {_key(one): one for one in _manifests(BASE[0])}
    written = {
        "base/namespace.yaml": _dump([NAMESPACE], BASE[0]),
        "base/outrider.yaml": _dump(list(base.values()), BASE[0]),
        "base/kustomization.yaml": _kustomization(resources=["namespace.yaml", "outrider.yaml"]),
    }
    for name, (example, tag) in OVERLAYS.items():
        is_laptop = name == "laptop-cpu"
        manifests = {_key(one): one for one in _manifests(example, cpus=1 if is_laptop else 4)}
        if is_laptop:
            _ask_for_less(manifests["RayService", RELEASE]["spec"]["rayClusterConfig"])
        resources, patches = ["../../base"], []
        if added := [one for key, one in manifests.items() if key not in base]:
            resources.append("added.yaml")
            written[f"overlays/{name}/added.yaml"] = _dump(added, example)
        for key, one in base.items():
            target = dict(zip(("kind", "name"), key, strict=True))
            if key not in manifests:
                gone = {"apiVersion": one["apiVersion"], "kind": key[0], "metadata": {"name": key[1]}, "$patch": "delete"}
                patches.append({"target": target, "patch": yaml.safe_dump(gone, sort_keys=False)})
            elif changes := list(difference(one, manifests[key])):
                file = f"{key[0].lower()}.yaml"
                patches.append({"target": target, "path": file})
                written[f"overlays/{name}/{file}"] = _dump([changes], example)
        images = [{"name": RELEASE, "newTag": tag}]
        written[f"overlays/{name}/kustomization.yaml"] = _kustomization(
            namespace=RELEASE, resources=resources, patches=patches, images=images
        )
    return written


def difference(old: Any, new: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """A JSON patch (RFC 6902) that makes ``new`` of ``old``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in new:
                yield {"op": "remove", "path": place}
            else:
                yield from difference(old[key], new[key], place)
        for key in (key for key in new if key not in old):
            yield {"op": "add", "path": f"{path}/{key.replace('~', '~0').replace('/', '~1')}", "value": new[key]}
    elif isinstance(old, list) and isinstance(new, list):
        for i, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from difference(one, other, f"{path}/{i}")
        for i in reversed(range(len(new), len(old))):
            yield {"op": "remove", "path": f"{path}/{i}"}
        for other in new[len(old) :]:
            yield {"op": "add", "path": f"{path}/-", "value": other}
    elif old != new:
        yield {"op": "replace", "path": path, "value": new}


def _manifests(example: str, cpus: float = 4) -> list[Manifest]:
    config = with_shipped(load(CHART.parents[1] / "deploy" / "examples" / f"{example}.yaml"))
    claim = "" if example == BASE[0] else "models"
    options = Options(cpus=cpus, image=f"{RELEASE}:{BASE[1]}", models_claim=claim, model_gb=MODEL_GB)
    found = [one for one in yaml.safe_load_all(manifest(values_for(config, options), RELEASE)) if one is not None]
    for one in found:
        for label in _HELMS:
            one["metadata"].get("labels", {}).pop(label, None)
    return found


def _ask_for_less(cluster: Manifest) -> None:
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        requests = LAPTOP_REQUESTS[template["metadata"]["labels"]["outrider/role"]]
        template["spec"]["containers"][0]["resources"]["requests"] = requests


def _key(manifest: Manifest) -> tuple[str, str]:
    return str(manifest["kind"]), str(manifest["metadata"]["name"])


def _dump(documents: list[Any], example: str) -> str:
    return NOTE.format(example=example) + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def _kustomization(**fields: Any) -> str:
    given = {name: value for name, value in fields.items() if value}
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return yaml.dump(head | given, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Writes longer texts as blocks, and everything in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def write(folder: Path = CHART.parent) -> None:
    for path, text in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


if __name__ == "__main__":
    write()
