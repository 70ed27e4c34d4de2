"""Products in bfloat16 where a hypervisor offers half of AMX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import onednn
from engine.compiling import NoCompiler


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is restored, too."""
    monkeypatch.setenv(onednn.VARIABLE, "")
    monkeypatch.delenv(onednn.VARIABLE)


@pytest.mark.parametrize(
    ("has_amx", "tells", "expected"),
    [(False, False, None), (True, True, None), (True, False, onednn.WITHOUT_AMX)],
)
def test_amx_is_left_out_where_its_tiles_have_no_sizes(
    has_amx: bool, tells: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_has_amx", lambda: has_amx)
    monkeypatch.setattr(onednn, "_tells_tile_sizes", lambda: tells)
    onednn.leave_out_broken_amx()
    assert os.environ.get(onednn.VARIABLE) == expected


def test_what_the_user_has_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_has_amx", lambda: True)
    monkeypatch.setattr(onednn, "_tells_tile_sizes", lambda: False)
    monkeypatch.setenv(onednn.VARIABLE, "AVX2")
    onednn.leave_out_broken_amx()
    assert os.environ[onednn.VARIABLE] == "AVX2"


def test_without_a_compiler_nobody_knows_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise NoCompiler("no C compiler found")

    monkeypatch.setattr(onednn, "load_compiled", none)
    assert not onednn._tells_tile_sizes()


def test_the_cpu_is_asked_through_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    assert onednn._tells_tile_sizes() in (True, False)
    assert list(tmp_path.rglob("tile_sizes-*.so"))


def test_products_by_onednn_work_on_this_machine() -> None:
    """In a process of its own: where they do not it dies."""
    code = (
        "import engine, torch; x, w = torch.ones(16, 64).bfloat16(), torch.ones(96, 64).bfloat16();"
        "print(torch.nn.functional.linear(x, w).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"{16 * 96 * 64.0}")
