"""Limits torch, oneDNN and MKL to the CPU level in force. Also computing on a temporary thread before serving."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from engine.compiling import TILE_SIZES, NoCompiler, load_compiled
from engine.cpu_level import AMX, AVX2, AVX512, AVX512_BF16, GENERIC, CpuLevel, cpu_level

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# oneDNN reads the second where the first is not set.
ONEDNN_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
VARIABLES = (*ONEDNN_VARIABLES, "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
ONEDNN_WITHOUT_AMX = "AVX512_CORE_FP16"

# Limits of oneDNN, torch's own kernels and MKL at a lowered level.
_LIMITS = {
    GENERIC: ("SSE41", "default", "SSE4_2"),
    AVX2: ("AVX2", "avx2", "AVX2"),
    AVX512: ("AVX512_CORE", "avx512", "AVX512"),
    AVX512_BF16: (ONEDNN_WITHOUT_AMX, "avx512", "AVX512"),
}


def configure_cpu() -> CpuLevel:
    """Limits torch, oneDNN and MKL to the CPU level in force, by the environment of this process and its children. Every
    entry point calls this before torch's first product, since the libraries read their variables once.

    Where ``OUTRIDER_CPU`` lowers the level, the variables are overwritten. Otherwise at most one is set: some hypervisors
    offer AMX without the sizes of its tiles, and oneDNN then dies of an illegal instruction, so it is told to leave AMX out
    unless the user has limited it. The kernels in ``engine/cpu`` know the sizes.
    """
    level = cpu_level()
    if level.is_lowered:
        onednn, aten, mkl = _LIMITS[level.name]
        limits = {ONEDNN_VARIABLES[0]: onednn, "ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl}
    elif level.name == AMX and not any(map(os.environ.get, ONEDNN_VARIABLES)) and not _tells_tile_sizes():
        limits = {ONEDNN_VARIABLES[0]: ONEDNN_WITHOUT_AMX}
    else:
        limits = {}
    os.environ.update(limits)
    _log(level)
    return level


@cache
def _log(level: CpuLevel) -> None:
    """Once in a process."""
    logger.info("CPU level %s", level)


def _tells_tile_sizes() -> bool:
    """Whether oneDNN can use this machine's AMX. False where no compiler is there to find out."""
    try:
        return bool(load_compiled("tile_sizes", (TILE_SIZES,)).tells_tile_sizes())
    except NoCompiler as error:
        logger.warning(
            "oneDNN does not use AMX, since without a compiler its support cannot be checked (%s); set %s=AVX512_CORE_AMX "
            "to use it",
            error,
            ONEDNN_VARIABLES[0],
        )
        return False


def in_own_thread(call: Callable[[], Result]) -> Result:
    """Runs ``call`` on a thread that ends with it; returns or raises what it does.

    OpenMP gives every computing thread a team that lives as long. With more members than processors, each product must wake
    idle ones: a pass of SmolLM2-135M with four rows on two cores takes 16 ms instead of 9.4. So loading and measuring on a
    CPU are done here.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="own") as executor:
        return executor.submit(call).result()
