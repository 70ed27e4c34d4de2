"""What a first hour on a GPU should check, in one command: `make test-gpu`, or `python -m tests.gpu` in a checkout.

Needs torch, Triton, transformers, numpy, scipy, grpcio, protobuf and pydantic, no network. `--device cpu`: without a GPU."""

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.skipped import Skipped

LIMIT_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native", help="vllm: only times of its steps")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the report")
    asked = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here: --device cpu is a dry run")
    report = Report(asked.out, asked.engine)
    (_vllm if asked.engine == "vllm" else _native)(asked.device, report)
    return report.end()


class Report:
    """Written after every check, so that one that never ends leaves those before it."""

    def __init__(self, folder: Path, engine: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / engine
        self.facts: dict[str, Any] = {"engine": engine}
        self.timings: list[dict[str, Any]] = []
        self._checks: list[dict[str, Any]] = []

    def run(self, name: str, check: Callable[[Path], None]) -> None:
        start_s, result = time.monotonic(), "passed"
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(Path(folder))
            except Skipped as reason:
                result = f"skipped: {reason}"
            except Exception as failure:  # noqa: BLE001  one that fails must not hide the others
                traceback.print_exc()
                result = f"FAILED: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        seconds = round(time.monotonic() - start_s, 1)
        print(f"{name}: {result} ({seconds} s)", flush=True)
        self._checks.append({"name": name, "result": result, "seconds": seconds})
        report = {**self.facts, "checks": self._checks, "timings": self.timings}
        self._path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(_page(report))

    def end(self) -> int:
        """The exit status."""
        results = [one["result"].partition(":")[0] for one in self._checks]
        passed, failed, skipped = (results.count(result) for result in ("passed", "FAILED", "skipped"))
        print(f"{self._path}.json, {self._path}.md\n{passed} passed, {failed} failed, {skipped} skipped")
        return int(failed > 0)


def _native(device: str, report: Report) -> None:
    from engine.cpu_setup import configure_cpu
    from tests.gpu.checks import CHECKS
    from tests.gpu.place import Place
    from tests.gpu.timings import native_timings

    configure_cpu()
    place = Place(device)
    report.facts |= place.facts()
    for name, check in CHECKS:
        report.run(name, partial(check, place))
    report.run("timings", lambda _: native_timings(place, report.timings))


def _vllm(device: str, report: Report) -> None:
    from tests.gpu.vllm_timings import vllm_timings

    report.run("timings", partial(vllm_timings, device, report.timings))


def _page(report: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in report.items() if not isinstance(value, list))
    lines = [f"# {facts}", "", "| check | result | s |", "|---|---|---|"]
    lines += [f"| {one['name']} | {one['result']} | {one['seconds']} |" for one in report["checks"]]
    lines += ["", "A floor is the bytes that must be read and written, at the rate of the copy in the first row.", ""]
    lines += ["| timing | ms | floor, ms | times the floor |", "|---|---|---|---|"]
    for timing in report["timings"]:
        ms, floor_ms = timing["ms"], timing["floor_ms"]
        floor = "|" if floor_ms is None else f"{floor_ms:.4f} | {ms / floor_ms:.1f}"
        lines.append(f"| {timing['name']} | {ms:.4f} | {floor} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
