"""The kustomize base and overlays: they are what the chart renders for the examples, and a typo in any file is found."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml

from deploy.k8s import kustomize
from deploy.k8s.kustomize import OVERLAYS, difference, files
from tests.support.manifests import ROOT, Manifest, documents, only, pod_templates, problems

FOLDER = ROOT / "k8s"
_TEXT = {"type": "string"}
FIELDS: dict[str, Any] = {
    "apiVersion": {"const": "kustomize.config.k8s.io/v1beta1"},
    "kind": {"const": "Kustomization"},
    "namespace": _TEXT,
    "resources": {"type": "array", "items": _TEXT},
    "patches": {"type": "array"},
    "images": {"type": "array"},
}
PARTS = {"patches": {"target", "path", "patch"}, "images": {"name", "newName", "newTag"}}


def build(overlay: str, folder: Path = FOLDER) -> list[Manifest]:
    """What `kubectl kustomize` prints, less the namespace and the images. Raises ValueError: a file has an unknown field,
    or a patch does not fit."""
    place = folder / "overlays" / overlay
    kustomization = _kustomization(place)
    base = _kustomization(folder / "base")["resources"]
    manifests = [manifest for file in base for manifest in documents((folder / "base" / file).read_text())]
    for patch in kustomization.get("patches", ()):
        target = patch["target"]
        (one,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (target["kind"], target["name"])]
        manifests.remove(one)
        if "path" in patch:
            (operations,) = documents((place / patch["path"]).read_text())
            try:
                manifests.append(jsonpatch.apply_patch(one, operations))
            except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
                raise ValueError(str(error)) from error
        elif yaml.safe_load(patch["patch"]).get("$patch") != "delete":
            raise ValueError("only deletions are patches in place")
    for file in kustomization["resources"]:
        if file != "../../base":
            manifests += documents((place / file).read_text())
    return manifests


def _kustomization(place: Path) -> dict[str, Any]:
    (found,) = documents((place / "kustomization.yaml").read_text())
    unknown = found.keys() - FIELDS.keys()
    for field, known in PARTS.items():
        unknown |= {key for part in found.get(field, ()) for key in part.keys() - known}
    if unknown:
        raise ValueError(f"unknown fields {unknown}")
    return dict(found)


def faults(overlay: str, folder: Path) -> list[str]:
    try:
        return [problem for manifest in build(overlay, folder) for problem in problems(manifest)]
    except (ValueError, KeyError, OSError) as error:
        return [str(error)]


def test_the_files_are_those_that_the_chart_makes(capsys: pytest.CaptureFixture[str]) -> None:
    made = files()
    found = {str(path.relative_to(FOLDER)) for part in ("base", "overlays") for path in (FOLDER / part).rglob("*.*")}
    assert found == made.keys()
    changed = [path for path, text in made.items() if (FOLDER / path).read_text() != text]
    assert changed == [], "run: python -m deploy.k8s.kustomize"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str) -> None:
    assert faults(overlay, FOLDER) == []
    kinds = [manifest["kind"] for manifest in build(overlay)]
    assert kinds.count("RayService") == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_the_same(overlay: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)], capture_output=True, text=True, timeout=60, check=True
    )
    built = documents(done.stdout)
    assert [problem for manifest in built for problem in problems(manifest)] == []
    tag = OVERLAYS[overlay][1]
    expected = json.loads(json.dumps(build(overlay)).replace(f'"outrider:{kustomize.BASE[1]}"', f'"outrider:{tag}"'))
    for manifest in built:
        assert manifest["kind"] == "Namespace" or manifest["metadata"].pop("namespace") == "outrider"
    assert sorted(map(_stable, built)) == sorted(map(_stable, expected))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_namespace_exists_and_admits_the_pods(overlay: str) -> None:
    """By the fields that the Pod Security Standard `restricted` asks for. KubeRay's own containers copy those of Ray's."""
    manifests = build(overlay)
    namespace = only(manifests, "Namespace")["metadata"]
    assert namespace["name"] == _kustomization(FOLDER / "overlays" / overlay)["namespace"]
    assert namespace["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    service = only(manifests, "RayService")
    for pod in (template["spec"] for template in pod_templates(service)):
        assert pod["securityContext"].items() >= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}.items()
        for container in (
            *pod["initContainers"],
            *pod["containers"],
            service["spec"]["rayClusterConfig"]["autoscalerOptions"],
        ):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        for volume in pod["volumes"]:
            assert volume.keys() - {"name"} <= {"downwardAPI", "emptyDir", "persistentVolumeClaim", "projected"}


def test_laptop_cpu_fits_a_machine_of_4_cpus_and_16_gib() -> None:
    """With a CPU and 4 GiB for Kubernetes and KubeRay; and docs/kubernetes.md has the sums."""
    cluster = only(build("laptop-cpu"), "RayService")["spec"]["rayClusterConfig"]
    asked = [cluster["autoscalerOptions"]["resources"]["requests"]]
    for group in ({"replicas": 1} | cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,), (first,) = pod["containers"], pod["initContainers"]
        assert _number(first["resources"]["requests"]["cpu"]) <= _number(container["resources"]["requests"]["cpu"])
        assert _number(first["resources"]["requests"]["memory"]) <= _number(container["resources"]["requests"]["memory"])
        asked += [container["resources"]["requests"]] * group["replicas"]
    cpus, memory_gib = (sum(_number(one[what]) for one in asked) for what in ("cpu", "memory"))
    assert cpus <= 3
    assert memory_gib <= 12
    assert f"{cpus:g} CPUs and {memory_gib:g} GiB" in (ROOT / "docs" / "kubernetes.md").read_text()
    assert "type: NodePort" not in yaml.safe_dump(build("laptop-cpu")), "its clients are refused by the network policy"


def _number(quantity: str) -> float:
    """CPUs, or GiB."""
    for suffix, factor in (("m", 1e-3), ("Mi", 2**-10), ("Gi", 1.0)):
        if quantity.endswith(suffix):
            return float(quantity.removesuffix(suffix)) * factor
    return float(quantity)


def _stable(manifest: Manifest) -> str:
    return json.dumps(manifest, sort_keys=True)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("base/outrider.yaml", "minAvailable:", "minAvailabel:"),
        ("base/outrider.yaml", "workerGroupSpecs:", "workerGroupSpec:"),
        ("base/outrider.yaml", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: yes please"),
        ("base/namespace.yaml", "labels:", "lables:"),
        ("base/kustomization.yaml", "resources:", "resource:"),
        ("overlays/one-node/kustomization.yaml", "patches:", "patchs:"),
        ("overlays/one-node/kustomization.yaml", "  path:", "  paht:"),
        ("overlays/one-node/kustomization.yaml", "newTag:", "newTga:"),
        ("overlays/one-node/rayservice.yaml", "/replicas", "/replica"),
        ("overlays/one-node/rayservice.yaml", "op: replace", "op: replcae"),
        ("overlays/one-node/added.yaml", "minAvailable:", "minAvailabel:"),
    ],
)
def test_a_typo_in_any_file_is_found(tmp_path: Path, file: str, old: str, new: str) -> None:
    for part in ("base", "overlays"):
        shutil.copytree(FOLDER / part, tmp_path / part)
    assert faults("one-node", tmp_path) == []
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    assert faults("one-node", tmp_path) != []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"a": 1, "b": [1, 2, 3]}, {"a": 2, "b": [1]}),
        ({"a/b": {"c~d": 1}}, {"a/b": {"c~d": 2, "e": [1]}}),
        ({"a": [{"x": 1}]}, {"a": [{"y": 1}, {"x": 2}]}),
        ({"a": {"b": 1}}, {"a": "b"}),
    ],
)
def test_the_patch_makes_the_one_of_the_other(old: Any, new: Any) -> None:
    assert jsonpatch.apply_patch(old, list(difference(old, new))) == new
