"""The command line: what it offers, and how quickly it says so."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import BENCHES
from deploy.cli import app
from deploy.console import without_colours
from engine.vllm import environment as vllm_version

COMMANDS = ("serve", "config", "chat", "status", "bench", "models", "train")
HEAVY = ("torch", "ray", "transformers", "fastapi", "openai", "numpy", "pydantic")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    assert command in CliRunner().invoke(app, ["--help"]).stdout
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_help_imports_nothing_heavy() -> None:
    """So that it is there at once: a wall time would depend on the machine, what is imported does not."""
    code = f"""
import sys
from typer.testing import CliRunner
from deploy.cli import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_help_of_bench_names_every_benchmark() -> None:
    text = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).stdout
    assert all(name in text for name in BENCHES)


def test_the_configuration_is_printed_whole() -> None:
    assert "kv_cache_gb: auto" in CliRunner().invoke(app, ["config"]).stdout


def test_a_wrong_configuration_is_an_error_that_names_line_and_key(tmp_path) -> None:
    (tmp_path / "outrider.yaml").write_text("model:\n  nam: x\n")
    refused = CliRunner().invoke(app, ["config", str(tmp_path / "outrider.yaml")])
    assert refused.exit_code == 1
    assert "line 2" in refused.stderr
    assert "did you mean 'name'" in refused.stderr


def test_models_without_a_word_lists_them() -> None:
    assert "smollm2-135m" in CliRunner().invoke(app, ["models"], env={"COLUMNS": "200"}).stdout


@pytest.mark.parametrize("command", ["chat", "status"])
def test_without_a_server_one_line_says_so(command: str) -> None:
    refused = CliRunner().invoke(app, [command, "--url", "http://127.0.0.1:9"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("outrider: ")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("installed", "words"),
    [({}, "is not installed in this environment"), ({"vllm": "0.31.1"}, "this environment has 0.31.1")],
)
def test_a_file_that_asks_for_vllm_is_refused_without_the_right_one(
    installed: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm_version, "version", found)
    (tmp_path / "outrider.yaml").write_text("target: {engine: vllm}")
    refused = CliRunner().invoke(app, ["config", str(tmp_path / "outrider.yaml")])
    assert refused.exit_code == 1
    assert "target.engine" in refused.stderr
    assert words in refused.stderr


@pytest.mark.parametrize("command", [["serve"], ["config"], ["profile"], ["scale", "--targets", "1"]])
def test_a_file_that_does_not_exist_is_named(command: list[str]) -> None:
    ran = CliRunner().invoke(app, [*command, "nofile.yaml"])
    assert (ran.exit_code, ran.stderr) == (
        1,
        "outrider: FILE: the file does not exist; `--model` names a model, got 'nofile.yaml'\n",
    )


@pytest.mark.parametrize(("no_colour", "is_terminal", "plain"), [("", True, False), ("1", True, True), ("", False, True)])
def test_colours_are_for_terminals_alone(
    no_colour: str, is_terminal: bool, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    assert without_colours() is plain
