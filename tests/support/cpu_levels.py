"""CPU levels below the machine's own, and environments of processes at them."""

import os
from pathlib import Path

from engine.cpu_level import machine_level, possible_levels
from engine.cpu_setup import VARIABLES

ROOT = Path(__file__).parents[2]
LOWER_LEVELS = possible_levels(machine_level())[:-1]  # lowest first
NO_COMPILER = {"CC": "no-such-compiler"}


def environment_of(level: str) -> dict[str, str]:
    """Of a child at ``level``, or at the machine's own for ``auto``, without the limits of this process."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return kept | {"OUTRIDER_CPU": level, "PYTHONPATH": str(ROOT)}
