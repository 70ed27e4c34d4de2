"""Compiles C files for this CPU, once, into a cache folder. No torch."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import OutriderError

COMPILE_TIMEOUT_S = 120.0
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fno-math-errno")


class NoCompiler(OutriderError):
    """A library cannot be built or loaded here. Says why."""


def cache_folder() -> Path:
    """``$OUTRIDER_HOME/kernels``, else ``kernels`` in outrider's folder of the user's cache."""
    home = os.environ.get("OUTRIDER_HOME")
    if home:
        return Path(home).expanduser().absolute() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "outrider" / "kernels"


def load_compiled(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    flags: Sequence[str] = (),
    folder: Path | None = None,
    *,
    keeps_gil: bool = False,
) -> ctypes.CDLL:
    """The library of ``sources``, compiled if that has not been done on such a CPU.

    Args:
        name: of its file, before what tells builds apart.
        headers: that the sources include.
        flags: of the compiler, beside the usual ones.
        keeps_gil: other Python threads wait while its functions run. For such as mostly take microseconds: who lets go of
            the lock gets it back when another thread has had its turn.

    Raises:
        NoCompiler: no compiler is there, it failed, or the library does not load.
    """
    all_flags = (*_FLAGS, *flags)
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    try:
        path = (folder or cache_folder()) / f"{name}-{_key((*sources, *headers), all_flags, compiler)}.so"
        if not path.exists():
            _compile(path, sources, all_flags, compiler)
        return (ctypes.PyDLL if keeps_gil else ctypes.CDLL)(str(path))
    except (OSError, RuntimeError) as error:  # the latter from a home folder that is not known
        raise NoCompiler(f"the library {name} cannot be built or loaded: {error}") from error


def _compile(path: Path, sources: Sequence[Path], flags: Sequence[str], compiler: str | None) -> None:
    """In a folder of its own and then moved: whoever sees the library sees all of it."""
    if compiler is None:
        raise NoCompiler("no C compiler found: install gcc, or name one in $CC")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        objects, library = [Path(scratch) / f"{source.stem}.o" for source in sources], Path(scratch) / path.name
        for source, target in zip(sources, objects, strict=True):
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


def _key(files: Sequence[Path], flags: Sequence[str], compiler: str | None) -> str:
    """``-march=native`` means another library on another CPU, so its name and features are part of the key."""
    text = "\0".join(path.read_text() for path in files)
    parts = (text, repr(flags), compiler or "", platform.machine(), _cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted))
