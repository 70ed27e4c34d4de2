"""The benchmark framework: registry, options, output, expectations."""

import json
import sys
from types import ModuleType

import pytest
from rich.console import Console
from typer.testing import CliRunner

import benchmarks
from benchmarks.report import BenchOptions, BenchResult, Expectation, Table, failures, print_result
from deploy.cli import app


def _result(**figures: float) -> BenchResult:
    table = Table("per drafter", ("drafter", "accepted"), (("ngram", 0.123456), ("suffix", 7)))
    return BenchResult("demo", figures, (table,), ("a note",))


@pytest.fixture
def demo_bench(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """A registered benchmark that records its options and returns speed 2.0."""
    seen: list[BenchOptions] = []

    def run(options: BenchOptions) -> BenchResult:
        seen.append(options)
        return _result(speed=2.0)

    module = ModuleType("demo_bench_module")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "demo_bench_module", module)
    monkeypatch.setitem(benchmarks.BENCHES, "demo", benchmarks.Bench("demo_bench_module", "for the test"))
    return seen


def test_json_is_one_object_with_bench_figures_and_environment() -> None:
    line = _result(speed=2.0).to_json()
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["bench"] == "demo"
    assert entry["figures"] == {"speed": 2.0}
    assert entry["environment"]["versions"]["torch"]


def test_a_figure_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        _result(speed=float("nan")).to_json()


def test_the_table_shows_rows_figures_and_notes() -> None:
    console = Console(record=True, width=100, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115 (closed with the test)
    print_result(_result(speed=2.0), console)
    text = console.export_text()
    console.file.close()
    for shown in ("per drafter", "0.1235", "suffix", "speed", "a note"):
        assert shown in text


def test_stdout_holds_only_the_json(demo_bench: list[BenchOptions]) -> None:
    outcome = CliRunner().invoke(app, ["bench", "demo", "--quick", "--prompts", "a.jsonl", "b.jsonl"])
    assert outcome.exit_code == 0
    assert json.loads(outcome.stdout)["figures"] == {"speed": 2.0}
    assert "per drafter" in outcome.stderr
    (options,) = demo_bench
    assert options.quick
    assert [str(path) for path in options.prompts] == ["a.jsonl", "b.jsonl"]


def test_json_goes_to_a_file(demo_bench: list[BenchOptions], tmp_path) -> None:
    outcome = CliRunner().invoke(app, ["bench", "demo", "--json", str(tmp_path / "out.json")])
    assert outcome.exit_code == 0
    assert outcome.stdout == ""
    assert json.loads((tmp_path / "out.json").read_text())["bench"] == "demo"


def test_an_unwritable_file_is_one_line(demo_bench: list[BenchOptions], tmp_path) -> None:
    outcome = CliRunner().invoke(app, ["bench", "demo", "--json", str(tmp_path / "none" / "out.json")])
    assert outcome.exit_code == 1
    assert outcome.stderr.strip().splitlines()[-1].startswith("outrider: --json: cannot be written")


@pytest.mark.parametrize(("bound", "code"), [("speed>=2", 0), ("speed<=1.9", 1), ("other>=0", 1)])
def test_expectations_decide_the_exit_code(demo_bench: list[BenchOptions], bound: str, code: int) -> None:
    assert CliRunner().invoke(app, ["bench", "demo", "--expect", bound]).exit_code == code


def test_an_unmet_expectation_names_the_value() -> None:
    assert failures(_result(speed=2.0), [Expectation.parse("speed >= 3")]) == ["speed is 2, expected >= 3"]


@pytest.mark.parametrize("text", ["speed", "speed>3", "speed>=fast"])
def test_a_malformed_expectation_is_refused_before_the_run(demo_bench: list[BenchOptions], text: str) -> None:
    outcome = CliRunner().invoke(app, ["bench", "demo", "--expect", text])
    assert outcome.exit_code == 1
    assert demo_bench == []


def test_an_unknown_benchmark_is_one_line_and_exit_code_1() -> None:
    outcome = CliRunner().invoke(app, ["bench", "invarience"])
    assert outcome.exit_code == 1
    assert outcome.stderr.count("\n") == 1
    assert "did you mean invariance" in outcome.stderr
