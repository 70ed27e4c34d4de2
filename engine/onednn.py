"""What has to be settled before torch makes its first product on a CPU."""

import logging
import os
from pathlib import Path

from engine.compiling import NoCompiler, load_compiled

logger = logging.getLogger(__name__)

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN reads the second where the first is not set
WITHOUT_AMX = "AVX512_CORE_FP16"
_SOURCE = Path(__file__).parent / "cpu" / "tile_sizes.c"


def leave_out_broken_amx() -> None:
    """Some hypervisors offer AMX and hide how large its tiles are. oneDNN takes them for empty then, and the process dies of
    an illegal instruction at the first product of two rows in bfloat16. It is told to do without, unless the user has said
    what it may use; kernels of ours (``cpu/tiles.c``) know the sizes. So it is where no compiler is there to find out.
    """
    if any(variable in os.environ for variable in VARIABLES) or not _has_amx():
        return
    try:
        if load_compiled("tile_sizes", (_SOURCE,)).tells_tile_sizes():
            return
    except NoCompiler as error:
        logger.warning(
            "oneDNN does without AMX, for it cannot be found out whether it works (%s); %s=AVX512_CORE_AMX uses it",
            error,
            VARIABLES[0],
        )
    os.environ[VARIABLES[0]] = WITHOUT_AMX


def _has_amx() -> bool:
    try:
        with Path("/proc/cpuinfo").open() as lines:  # those of the first core are those of all
            return "amx_tile" in next((line for line in lines if line.startswith("flags")), "").split()
    except OSError:
        return False
