"""Products in bfloat16 where a hypervisor offers half of AMX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import onednn
from engine.compiling import NoCompiler, load_compiled


class Library:
    def __init__(self, tells: bool) -> None:
        self._tells = tells

    def tells_tile_sizes(self) -> int:
        return int(self._tells)


@pytest.fixture(autouse=True)
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that says it has it, and a user who has said nothing; what is set is restored."""
    for variable in onednn.VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(onednn, "_has_amx", lambda: True)


@pytest.mark.parametrize(("tells", "expected"), [(True, None), (False, onednn.WITHOUT_AMX)])
def test_amx_is_left_out_where_its_tiles_have_no_sizes(
    tells: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "load_compiled", lambda *_: Library(tells))
    onednn.leave_out_broken_amx()
    assert os.environ.get(onednn.VARIABLES[0]) == expected


def test_nothing_is_asked_where_there_is_no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_has_amx", lambda: False)
    monkeypatch.setattr(onednn, "load_compiled", lambda *_: pytest.fail("asked"))
    onednn.leave_out_broken_amx()
    assert onednn.VARIABLES[0] not in os.environ


@pytest.mark.parametrize("variable", onednn.VARIABLES)
def test_what_the_user_has_said_stays(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "load_compiled", lambda *_: Library(False))
    monkeypatch.setenv(variable, "AVX2")
    onednn.leave_out_broken_amx()
    assert [os.environ.get(one) for one in onednn.VARIABLES if one == variable] == ["AVX2"]
    assert onednn.WITHOUT_AMX not in (os.environ.get(one) for one in onednn.VARIABLES)


def test_without_a_compiler_it_is_left_out_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise NoCompiler("no C compiler found")

    monkeypatch.setattr(onednn, "load_compiled", none)
    onednn.leave_out_broken_amx()
    assert os.environ[onednn.VARIABLES[0]] == onednn.WITHOUT_AMX
    assert "no C compiler found" in caplog.text


def test_the_library_is_there_and_answers(tmp_path: Path) -> None:
    """A CPU tells of no tiles that it does not have."""
    library = load_compiled("tile_sizes", (onednn._SOURCE,), folder=tmp_path)
    if library.tells_tile_sizes():
        assert "amx_tile" in Path("/proc/cpuinfo").read_text()


def test_products_by_onednn_work_on_this_machine() -> None:
    """In a process of its own: where they do not it dies."""
    code = (
        "import engine, torch; x, w = torch.ones(16, 64).bfloat16(), torch.ones(96, 64).bfloat16();"
        "print(torch.nn.functional.linear(x, w).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"{16 * 96 * 64.0}")
