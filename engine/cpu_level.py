"""The CPU level, which limits the instructions of kernels, torch and oneDNN: the machine's, or a lower ``OUTRIDER_CPU``.

No torch. Importing this reads and sets nothing.
"""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.errors import InvalidField

VARIABLE = "OUTRIDER_CPU"
AUTO = "auto"
GENERIC, NEON = "generic", "neon"
AVX2, AVX512, AVX512_BF16, AMX = "avx2", "avx512", "avx512_bf16", "amx"
# On x86-64 each level includes those before it. NEON stands alone: an ARM CPU has no lower level.
X86_LEVELS = (GENERIC, AVX2, AVX512, AVX512_BF16, AMX)

# Features of a level beside those of the levels before it, under Linux's names.
_FEATURES = {
    GENERIC: (),
    AVX2: ("avx2", "fma", "f16c", "bmi1", "bmi2"),
    AVX512: ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    AVX512_BF16: ("avx512_bf16",),
    AMX: ("amx_tile", "amx_bf16"),
}
_X86_MACHINES = ("x86_64", "amd64")
_ARM_MACHINES = ("aarch64", "arm64")
_SYSCTL_NAMES = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
_NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """The level in force, and the machine's own. ``name`` never exceeds ``machine``."""

    name: str
    machine: str

    @property
    def is_lowered(self) -> bool:
        return self.name != self.machine

    @property
    def has_bf16_products(self) -> bool:
        """Whether torch and oneDNN multiply in bf16 at full speed. Below AVX-512 BF16 ``F.linear`` in bf16 takes about ten
        times as long as in fp32, and below AVX-512 ``mkldnn._reorder_linear_weight`` refuses bf16."""
        return self.includes(AVX512_BF16)

    def includes(self, level: str) -> bool:
        """Whether all instructions of ``level`` may be used."""
        return level in possible_levels(self.name)

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """Which instructions a C compiler may use at this level."""
        if self.machine == NEON:
            return ("-mcpu=native",)  # clang on ARM has no -march=native
        if platform.machine().lower() not in _X86_MACHINES:
            return ()
        if not self.is_lowered:
            return ("-march=native",)
        if self.name == AVX512_BF16:
            return ("-march=native", *_NO_AMX)
        lower = X86_LEVELS[: X86_LEVELS.index(self.name) + 1]
        return ("-march=x86-64", *(f"-m{name.replace('bmi1', 'bmi')}" for level in lower for name in _FEATURES[level]))

    def __str__(self) -> str:
        return f"{self.name}, lowered from {self.machine} by {VARIABLE}" if self.is_lowered else self.name


def cpu_level() -> CpuLevel:
    """The level in force: the machine's own, or what ``OUTRIDER_CPU`` lowers it to. Reads the variable at each call. Raises
    InvalidField: the variable names no level, or one above the machine's own."""
    machine = machine_level()
    name = os.environ.get(VARIABLE) or AUTO
    if name == AUTO:
        return CpuLevel(machine, machine)
    possible = possible_levels(machine)
    if name not in possible:
        reason = f"is above this machine's own level, {machine}" if name in (*X86_LEVELS, NEON) else "is no CPU level"
        raise InvalidField(VARIABLE, name, f"{reason}: use {AUTO} or one of {', '.join(possible)}")
    return CpuLevel(name, machine)


def possible_levels(machine: str) -> tuple[str, ...]:
    """The levels that a machine of a given level has, lowest first."""
    return X86_LEVELS[: X86_LEVELS.index(machine) + 1] if machine in X86_LEVELS else (machine,)


@cache
def machine_level() -> str:
    """The highest level that this machine has."""
    return level_of(platform.machine(), _features())


def level_of(architecture: str, features: frozenset[str]) -> str:
    """The highest level of a CPU. ``architecture``: as ``platform.machine`` names it. ``features``: under Linux's names."""
    if architecture.lower() in _ARM_MACHINES:
        return NEON  # part of every 64-bit ARM CPU
    highest = GENERIC
    if architecture.lower() in _X86_MACHINES:
        for level in X86_LEVELS:
            if not features.issuperset(_FEATURES[level]):
                break
            highest = level
    return highest


def _features() -> frozenset[str]:
    """Features of the first core, which all cores share."""
    if sys.platform == "darwin":
        return _sysctl_features()
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    except OSError:
        return frozenset()


def _sysctl_features() -> frozenset[str]:
    """Features of an Intel Mac's CPU, from sysctl. It has no AVX-512 BF16 and no AMX."""
    command = ["/usr/sbin/sysctl", "-n", *_SYSCTL_NAMES]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(told.lower().split())
