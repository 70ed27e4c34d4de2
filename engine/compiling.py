"""Compiles C files for the CPU level in force into a cache folder. No torch."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from cluster.errors import OutriderError
from cluster.private_folder import cache_folder, make_private
from engine.cpu_level import CpuLevel, cpu_level

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 120.0
VERSION_TIMEOUT_S = 10.0
TILE_SIZES = Path(__file__).parent / "cpu" / "tile_sizes.c"
# GCC for Zen 2 and 3 fuses a product and a sum or not by the shape of the code: a row would depend on those beside it.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "--param=avoid-fma-max-bits=0")


class KernelsUnavailable(Exception):
    """Triton cannot compile or launch the kernels here; the message says why, in one line."""


class NoCompiler(OutriderError):
    """A library cannot be built or loaded here."""


def load_compiled(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    flags: Sequence[str] = (),
    folder: Path | None = None,
    *,
    level: CpuLevel | None = None,
    keeps_gil: bool = False,
) -> ctypes.CDLL:
    """The library of ``sources``, compiled if the cache has none for this CPU level, compiler and C library. A cached
    library that is incomplete or does not load is removed and compiled again, once.

    Args:
        folder: the cache, ``kernels`` in ``cache_folder()`` by default.
        level: CPU level to compile for, by default the one in force. The library crashes on a machine without that level.
        keeps_gil: for functions of microseconds, as reacquiring the GIL waits for a thread switch.

    Raises NoCompiler: no compiler is there, it failed, the library does not load, or others may write to the cache folder;
    InvalidField: ``OUTRIDER_CPU`` names no level of this machine.
    """
    level = level or cpu_level()
    all_flags = (*level.compiler_flags, *_FLAGS, *flags)
    load = ctypes.PyDLL if keeps_gil else ctypes.CDLL
    try:
        folder = folder or cache_folder() / "kernels"
        _prepare(folder)
        compiler = find_compiler()
        stem = f"{name}-{_key((*sources, *headers), all_flags, compiler)}"
        cached = _cached(folder, stem)
        if cached is not None:
            try:
                return load(str(cached))
            except OSError as error:
                logger.warning("%s does not load and is compiled again: %s", cached, error)
                cached.unlink(missing_ok=True)
        return load(str(_compile(folder, stem, sources, all_flags, compiler)))
    except (OSError, RuntimeError) as error:  # the latter from a home folder that is not known
        raise NoCompiler(f"the library {name} cannot be built or loaded: {error}") from error


def find_compiler() -> tuple[str, ...] | None:
    """The command of the C compiler: ``$CC`` if it is set, else the first of cc, gcc and clang. None: there is none."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        path = shutil.which(named[0])
        return None if path is None else (path, *named[1:])
    path = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return None if path is None else (path,)


def kernels_fault() -> str | None:
    """Why the kernels cannot be compiled or loaded here; None if they can. Tried with a small file, once in a process.
    Raises InvalidField: ``OUTRIDER_CPU`` names no level of this machine."""
    compiler = find_compiler()
    return _no_compiler() if compiler is None else _trial_fault(compiler)


@cache
def _trial_fault(compiler: tuple[str, ...]) -> str | None:
    try:
        load_compiled("tile_sizes", (TILE_SIZES,))
    except NoCompiler as error:
        return str(error)
    return None


def _no_compiler() -> str:
    named = os.environ.get("CC")
    return f"$CC names {named!r}, which was not found" if named else "no C compiler found: install gcc, or set CC"


@cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """Output of --version; empty if the compiler does not start."""
    try:
        command = [*compiler, "--version"]
        return subprocess.run(command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _prepare(folder: Path) -> None:
    """Makes the folder private. One of ours that others can read but not write, as in a copied home folder, is accepted."""
    if folder.is_dir():
        status = folder.stat()
        if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022:
            folder.chmod(0o700)
    make_private(folder)


def _cached(folder: Path, stem: str) -> Path | None:
    """The cached library, or None. File names hold a digest of the content, since loading a truncated library crashes."""
    found = None
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # another process has removed it as damaged
            continue
        if path.name == _name(stem, content):
            found = found or path
        else:
            logger.warning("%s is damaged and is compiled again", path)
            path.unlink(missing_ok=True)
    return found


def _name(stem: str, content: bytes) -> str:
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _compile(
    folder: Path, stem: str, sources: Sequence[Path], flags: Sequence[str], compiler: tuple[str, ...] | None
) -> Path:
    """Compiles in a temporary folder and renames the result, so that no process sees a partial library."""
    if compiler is None:
        raise NoCompiler(_no_compiler())
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        objects, library = [Path(scratch) / f"{source.stem}.o" for source in sources], Path(scratch) / "library.so"
        commands = [[*compiler, *flags, "-c", str(a), "-o", str(b)] for a, b in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count() or 1) as executor:
            list(executor.map(_run, commands))
        _run([*compiler, "-shared", *map(str, objects), "-o", str(library), "-lm"])
        return library.replace(folder / _name(stem, library.read_bytes()))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoCompiler(f"`{' '.join(command)}` took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise NoCompiler(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")


def _key(files: Sequence[Path], flags: Sequence[str], compiler: tuple[str, ...] | None) -> str:
    """Includes the CPU's name and features, on which ``-march=native`` depends."""
    text = "\0".join(path.read_text() for path in files)
    version = "" if compiler is None else compiler_version(compiler)
    parts = (text, repr(flags), repr(compiler), version, platform.machine(), _libc(), _cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _libc() -> str:
    """Name and version of the C library that this process runs with."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # not glibc
        return repr((platform.libc_ver(), platform.mac_ver()[0]))


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted))
