"""What has to be settled before torch makes its first product on a CPU."""

import logging
import os
from pathlib import Path

from engine.compiling import NoCompiler, load_compiled

logger = logging.getLogger(__name__)

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
_SOURCE = Path(__file__).parent / "cpu" / "tile_sizes.c"


def leave_out_broken_amx() -> None:
    """Some hypervisors offer AMX and hide how large its tiles are. oneDNN takes them for empty then, and the process dies of
    an illegal instruction at the first product of two rows in bfloat16. It is told to do without, unless the user has said
    what it may use; kernels of ours (``cpu/tiles.c``) know the sizes. So it is where no compiler is there to find out.
    """
    if VARIABLE in os.environ or not _has_amx() or _tells_tile_sizes():
        return
    os.environ[VARIABLE] = WITHOUT_AMX
    logger.info("this machine hides the sizes of its AMX tiles: oneDNN does without them (%s=%s)", VARIABLE, WITHOUT_AMX)


def _has_amx() -> bool:
    try:
        with Path("/proc/cpuinfo").open() as lines:  # those of the first core are those of all
            return "amx_tile" in next((line for line in lines if line.startswith("flags")), "").split()
    except OSError:
        return False


def _tells_tile_sizes() -> bool:
    try:
        return bool(load_compiled("tile_sizes", (_SOURCE,)).num_tile_palettes())
    except NoCompiler:
        return False
