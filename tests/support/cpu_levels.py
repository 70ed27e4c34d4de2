"""Processes at a CPU level of their own."""

import os
from pathlib import Path

from engine.cpu_setup import VARIABLES

ROOT = Path(__file__).parents[2]


def environment_of(level: str) -> dict[str, str]:
    """For a child at ``level``, or the machine's own for ``auto``: without the limits that this process runs under."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return kept | {"OUTRIDER_CPU": level, "PYTHONPATH": str(ROOT)}
