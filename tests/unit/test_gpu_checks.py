"""`make test-gpu` without a GPU: that every check and timing runs where only its few packages are installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.support.interpreted_triton  # noqa: F401  skips without Triton

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Refuses the imports of all packages that those named by the Makefile's users do not bring.
ONLY_NEEDED = """
import importlib.metadata as metadata, re, runpy, sys
from packaging.requirements import Requirement
def normal(name): return re.sub(r"[-_.]+", "-", name).lower()
left, needed = ["torch", "triton", "transformers", "numpy", "scipy", "grpcio", "protobuf", "pydantic"], set()
while left:
    name = normal(left.pop())
    if name not in needed:
        needed.add(name)
        try:
            requirements = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:
            continue
        left += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
brought = metadata.packages_distributions().items()
for module, names in brought:
    if not needed & set(map(normal, names)) and module not in sys.modules:
        sys.modules[module] = None
runpy.run_module("tests.gpu", run_name="__main__", alter_sys=True)
"""
# Of the first, some families do.
CANNOT_RUN = ("packed passes", "kernels launch", "bfloat16", "ranks over nccl", "parts of a device")


@pytest.mark.timeout(600)
def test_a_dry_run_of_the_checks_needs_few_packages_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONLY_NEEDED, "--device", "cpu", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "native.json").read_text())
    results = {check["name"]: check["result"] for check in report["checks"]}
    skipped = [name for name, result in results.items() if result != "passed"]
    assert all(name.startswith(CANNOT_RUN) for name in skipped)
    assert len(results) - len(skipped) >= 17
    assert all(timing["ms"] > 0 for timing in report["timings"])
    assert "| a draft token of 1 requests |" in (tmp_path / "native.md").read_text()


def test_a_check_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    from tests.gpu.__main__ import Report
    from tests.gpu.skipped import Skipped

    def fail(_: Path) -> None:
        raise AssertionError("1 is not 2")

    def skip(_: Path) -> None:
        raise Skipped("needs 2 GPUs")

    report = Report(tmp_path, "native")
    for name, check in (("a", fail), ("b", skip), ("c", lambda folder: None)):
        report.run(name, check)
    assert report.end() == 1
    written = json.loads((tmp_path / "native.json").read_text())
    assert [one["result"] for one in written["checks"]] == [
        "FAILED: AssertionError: 1 is not 2",
        "skipped: needs 2 GPUs",
        "passed",
    ]
