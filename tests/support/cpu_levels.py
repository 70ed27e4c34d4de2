"""CPU levels below the machine's own, and environments of processes at them."""

import os
from pathlib import Path

import pytest

from engine.cpu_level import machine_level, possible_levels
from engine.cpu_setup import VARIABLES

ROOT = Path(__file__).parents[2]
LOWER_LEVELS = possible_levels(machine_level())[:-1]  # lowest first
NO_KERNELS = "no C compiler found"
NO_COMPILER = {"CC": "no-such-compiler"}


def environment_of(level: str) -> dict[str, str]:
    """Of a child at ``level``, or at the machine's own for ``auto``, without the limits of this process."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return kept | {"OUTRIDER_CPU": level, "PYTHONPATH": str(ROOT)}


def pretend(monkeypatch: pytest.MonkeyPatch, level: str, machine: str | None = None, *, kernels: bool = True) -> None:
    """This process is on a ``machine`` that the user has lowered to ``level``, by default one of that level."""
    monkeypatch.setattr("engine.cpu_level.machine_level", lambda: machine or level)
    monkeypatch.setenv("OUTRIDER_CPU", level)
    for module in ("engine.dtypes", "deploy.memory"):
        monkeypatch.setattr(f"{module}.kernels_fault", lambda: None if kernels else NO_KERNELS)
