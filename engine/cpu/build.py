"""Compiles and loads the C kernels in this folder. They use the OpenMP runtime that torch has loaded, with torch's threads:
two runtimes in a process would oversubscribe the cores."""

import ctypes
import logging
from pathlib import Path

import torch

from engine.compiling import compiler_version, find_compiler, load_compiled

logger = logging.getLogger(__name__)

_SOURCES = (
    "kernels.c",
    "attention.c",
    "attention_tiles.c",
    "bf16.c",
    "tiles.c",
    "products.c",
    "quantised.c",
    "layer.c",
    "gumbel_argmax.c",
)
_HEADERS = ("vectors.h", "operators.h", "attention.h", "bf16.h")
SOURCES = tuple(Path(__file__).with_name(name) for name in _SOURCES)
HEADERS = (*(Path(__file__).with_name(name) for name in _HEADERS), Path(__file__).parent.with_name("noise.h"))
_OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


def load_library(dtype: torch.dtype, folder: Path | None = None, kv_dtype: torch.dtype | None = None) -> ctypes.CDLL:
    """The kernels for activations of ``dtype`` and a KV cache of ``kv_dtype``, by default the same. Raises NoCompiler: no
    compiler is there, it failed, or the library does not load."""
    runtime, compiler = openmp_runtime(), find_compiler()
    flags = [f"-DELEM_BF16={int(dtype == torch.bfloat16)}", f"-DKV_BF16={int((kv_dtype or dtype) == torch.bfloat16)}"]
    is_clang = compiler is not None and "clang" in compiler_version(compiler)
    if runtime is not None and is_clang and Path(runtime).name.startswith("libgomp"):
        # clang's code calls functions that only LLVM's and Intel's runtimes have.
        logger.warning(
            "CPU kernels run on one thread: clang cannot use torch's OpenMP runtime, %s; install gcc and set CC=gcc", runtime
        )
    elif runtime is not None:
        flags.append("-fopenmp")
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return load_compiled("kernels", SOURCES, HEADERS, flags, folder)


def openmp_runtime() -> str | None:
    """Path of the OpenMP library that torch has loaded; None where it cannot be found, and kernels run on one thread."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in mapped if line.count("/")}
    for name in _OPENMP_RUNTIMES:
        for path in sorted(paths):
            if Path(path).name.startswith(name):
                return path
    return None
