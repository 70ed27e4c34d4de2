"""Compiles the C files beside it for this CPU, once, into a cache folder.

The library is linked without an OpenMP runtime: it takes the one that torch has already loaded, and with it torch's own
threads. Two runtimes in a process would have twice the threads, waiting for each other.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from cluster.errors import OutriderError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "attention.c", "bf16.c", "products.c", "race.c"))
HEADERS = (Path(__file__).with_name("vectors.h"),)
COMPILE_TIMEOUT_S = 120.0
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fno-math-errno")
_OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class NoCompiler(OutriderError):
    """The kernels cannot be built or loaded here. Says why."""


def cache_folder() -> Path:
    """``$OUTRIDER_HOME/kernels``, else ``kernels`` in outrider's folder of the user's cache."""
    home = os.environ.get("OUTRIDER_HOME")
    if home:
        return Path(home).expanduser().absolute() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "outrider" / "kernels"


def load_library(dtype: torch.dtype, folder: Path | None = None) -> ctypes.CDLL:
    """The kernels for activations and KV cache of ``dtype``, compiled if that has not been done on such a CPU.

    Raises:
        NoCompiler: no compiler is there, it failed, or the library does not load.
    """
    runtime = _openmp_runtime()
    flags = (*_FLAGS, f"-DELEM_BF16={int(dtype == torch.bfloat16)}", *(() if runtime is None else ("-fopenmp",)))
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    path = (folder or cache_folder()) / f"kernels-{_key(flags, compiler)}.so"
    try:
        if not path.exists():
            _compile(path, flags, compiler)
        if runtime is not None:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoCompiler(f"{path} cannot be built or loaded ({error})") from error


def _compile(path: Path, flags: tuple[str, ...], compiler: str | None) -> None:
    """In a folder of its own and then moved: whoever sees the library sees all of it."""
    if compiler is None:
        raise NoCompiler("no C compiler found: install gcc, or name one in $CC")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        objects, library = [Path(scratch) / f"{source.stem}.o" for source in SOURCES], Path(scratch) / "kernels.so"
        for source, target in zip(SOURCES, objects, strict=True):
            _run([compiler, *flags, "-c", str(source), "-o", str(target)])
        _run([compiler, "-shared", *map(str, objects), "-o", str(library), "-lm"])
        library.replace(path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoCompiler(f"`{' '.join(command)}` took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise NoCompiler(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")


def _key(flags: tuple[str, ...], compiler: str | None) -> str:
    """``-march=native`` means another library on another CPU, so its name and features are part of the key."""
    text = "\0".join(path.read_text() for path in (*SOURCES, *HEADERS))
    parts = (text, repr(flags), compiler or "", platform.machine(), _cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted))


def _openmp_runtime() -> str | None:
    """The OpenMP library that torch has loaded; None where the platform does not tell, and kernels run on one thread."""
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
