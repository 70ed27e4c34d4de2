"""The cache of compiled libraries."""

import ctypes
import hashlib
import logging
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import compiling
from engine.compiling import NoCompiler, load_compiled
from engine.cpu import build
from engine.cpu_level import possible_levels
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "answer.c"
    file.write_text("int answer(void) { return 42; }\n")
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def num_builds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Filled as libraries are compiled."""
    builds: list[object] = []
    run = subprocess.run

    def counted(command: Sequence[str], **options: Any) -> Any:
        if "-shared" in command:
            builds.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return builds


@pytest.mark.parametrize("num_bytes", [0, 100, 5000], ids=["empty", "header", "half"])
def test_a_truncated_library_is_compiled_again_once(
    num_bytes: int, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_compiled("answer", (source,), folder=cache)
    (library,) = cache.iterdir()
    content = library.read_bytes()
    library.unlink()  # this process has it mapped
    library.write_bytes(content[:num_bytes])
    builds = num_builds(monkeypatch)
    assert load_compiled("answer", (source,), folder=cache).answer() == 42
    assert load_compiled("answer", (source,), folder=cache).answer() == 42
    assert len(builds) == 1
    assert "is damaged" in caplog.text
    assert len(list(cache.iterdir())) == 1


def test_a_library_that_does_not_load_is_compiled_again_once(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one made for another C library does: whole, and refused by the loader."""
    load_compiled("answer", (source,), folder=cache)
    (library,) = cache.iterdir()
    stem, foreign = library.name.rsplit("-", 1)[0], b"\x7fELF of another kind"
    library.unlink()
    (cache / f"{stem}-{hashlib.sha256(foreign).hexdigest()[:16]}.so").write_bytes(foreign)
    builds = num_builds(monkeypatch)
    assert load_compiled("answer", (source,), folder=cache).answer() == 42
    assert load_compiled("answer", (source,), folder=cache).answer() == 42
    assert len(builds) == 1
    assert "does not load" in caplog.text


def test_a_library_that_never_loads_is_refused_after_one_more_attempt(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "undefined.c"
    source.write_text("int is_nowhere(void);\nint (*const at_load)(void) = is_nowhere;\n")
    builds = num_builds(monkeypatch)
    for _ in range(2):
        with pytest.raises(NoCompiler, match="is_nowhere"):
            load_compiled("undefined", (source,), folder=cache)
    assert len(builds) == 2


@pytest.mark.parametrize("changed", ["libc", "compiler", "level", "source"])
def test_each_has_a_library_of_its_own(changed: str, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_compiled("answer", (source,), folder=cache)
    if changed == "libc":
        monkeypatch.setattr(compiling.os, "confstr", lambda _: "glibc 2.17")
    elif changed == "compiler":
        monkeypatch.setattr(compiling, "compiler_version", lambda _: "cc 99.0")
    elif changed == "level":
        lowest, *higher = possible_levels(compiling.cpu_level().machine)
        if not higher:
            pytest.skip("this machine has one level")
        monkeypatch.setenv("OUTRIDER_CPU", lowest)
    else:
        source.write_text("int answer(void) { return 43; }\n")
    load_compiled("answer", (source,), folder=cache)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, source: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(NoCompiler, match="must belong to this user and admit no other"):
        load_compiled("answer", (source,), folder=cache)
    assert not list(cache.iterdir())


def test_a_folder_of_another_user_is_refused(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    uid = cache.stat().st_uid
    monkeypatch.setattr(compiling.os, "geteuid", lambda: uid + 1)
    with pytest.raises(NoCompiler, match="must belong to this user and admit no other"):
        load_compiled("answer", (source,), folder=cache)


def test_a_folder_that_others_may_only_read_is_made_private(source: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o755)
    load_compiled("answer", (source,), folder=cache)
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_compiler_that_is_named_and_missing_is_an_error(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would not be what was asked for."""
    monkeypatch.setenv("CC", "no-such-cc -m64")
    with pytest.raises(NoCompiler, match="'no-such-cc -m64', which was not found"):
        load_compiled("answer", (source,), folder=cache)


def test_a_named_compiler_may_have_options(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("int answer(void) { return ANSWER; }\n")
    monkeypatch.setenv("CC", "cc -DANSWER=7")
    assert load_compiled("answer", (source,), folder=cache).answer() == 7


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_clang_without_torchs_openmp_makes_kernels_of_one_thread(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its code calls a runtime of its own, and torch has loaded GNU's."""
    if "libgomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("torch has not loaded libgomp")
    monkeypatch.setenv("CC", "clang")
    with caplog.at_level(logging.WARNING):
        library = build.load_library(torch.float32, cache)
    assert "run on one thread" in caplog.text
    gate_up, out = torch.tensor([[1.0] * 16 + [2.0] * 16]), torch.empty(1, 16)
    library.gate.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
    library.gate(gate_up.data_ptr(), out.data_ptr(), 1, 16, 2)
    assert torch.allclose(out, torch.nn.functional.silu(torch.ones(1, 16)) * 2, atol=1e-5)


def test_a_library_that_another_process_removes_meanwhile_is_compiled_again(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_compiled("answer", (source,), folder=cache)
    (library,) = cache.iterdir()
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path == library:
            monkeypatch.undo()
            path.unlink()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert load_compiled("answer", (source,), folder=cache).answer() == 42
    assert len(list(cache.iterdir())) == 1
