"""Options and results of benchmarks, written as a table for people and one JSON object for programs."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table as RichTable

from cluster.errors import InvalidField
from engine.cpu_level import cpu_level
from profiler.hardware import cpu_name, num_cores
from simulator.study import Cell as Cell
from simulator.study import Table as Table

DEFAULT_MODEL = "smollm2-135m"
STDOUT = "-"

_PACKAGES = ("outrider", "torch", "ray", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of ``trace``.

    - ``url``: of an OpenAI-compatible server; None: a server of its own.
    - ``file``: CSV, may be gzipped; None: made-up bursts.
    - ``rate``: mean requests per second.
    - ``max_tokens``: bounds each answer.
    - ``ttft_ms`` and ``tpot_ms``: objectives of each request.
    - ``plot``: PNG that is written.
    - ``multi_turn``: recorded conversations at two targets of its own, as in `benchmarks.conversations`.
    """

    url: str | None = None
    file: Path | None = None
    rate: float = 1.0
    max_tokens: int = 128
    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0
    plot: Path = Path("outrider-trace.png")
    multi_turn: bool = False


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options from the command line.

    - ``quick``: finish within 4 minutes on 2 cores.
    - ``prompts``: JSONL files or folders of them; none: synthetic prompts.
    - ``model``: a name of ``outrider models`` or a Hugging Face folder.
    - ``recording``: agreement, read by ``policies``, which writes it where it is missing.
    - ``data``: a folder whose prompts/ provides prompts.
    - ``dtype``: of the target of ``decode``, ``serve`` and ``invariance``; None: auto, of the last float32.
    - ``hosts``: ``faults``, ``burst`` and ``soak`` run over hosts made of network namespaces.
    - ``engine``: of the target of ``arms`` and ``invariance``: native or vllm.
    - ``trace``: of the benchmark of this name.
    """

    quick: bool = False
    prompts: tuple[Path, ...] = ()
    model: str = DEFAULT_MODEL
    recording: Path | None = None
    data: Path | None = None
    engine: str = "native"
    hosts: bool = False
    trace: TraceOptions = TraceOptions()
    dtype: str | None = None

    @property
    def data_prompts(self) -> tuple[Path, ...]:
        return () if self.data is None else (self.data / "prompts",)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and when figures were measured."""

    date: str
    cpu: str
    cpu_level: str
    num_cores: int
    memory_gb: float
    num_threads: int  # of torch's matrix products
    load_1min: float  # of the machine, at the start or end of the run
    python: str
    versions: Mapping[str, str]


def describe_environment() -> Environment:
    """Does not import the packages whose versions it names."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu=cpu_name(),
        cpu_level=str(cpu_level()),
        num_cores=num_cores(),
        memory_gb=round(psutil.virtual_memory().total / 2**30, 1),
        num_threads=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
        load_1min=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        versions={name: version(name) for name in _PACKAGES},
    )


@dataclass(frozen=True, slots=True)
class BenchResult:
    """``figures`` are the contract, under documented names (``step_over_floor.rows_1``)."""

    bench: str
    figures: Mapping[str, float]
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    environment: Environment = field(default_factory=describe_environment)

    def to_json(self) -> str:
        """One line. Refuses NaN and infinity: unmeasured figures are left out."""
        return json.dumps(asdict(self), allow_nan=False, ensure_ascii=False)


def print_result(result: BenchResult, console: Console) -> None:
    for table in (*result.tables, _figures_table(result)):
        rich_table = RichTable(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            rich_table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        for row in table.rows:
            rich_table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
        console.print(rich_table)
    for note in result.notes:
        console.print(note, highlight=False)
    where = result.environment
    console.print(
        f"{where.date}  {where.cpu}, {where.cpu_level}, {where.num_cores} cores, {where.num_threads} threads, "
        f"load {where.load_1min}",
        highlight=False,
    )


def _figures_table(result: BenchResult) -> Table:
    return Table(f"bench {result.bench}", ("figure", "value"), tuple((name, float(v)) for name, v in result.figures.items()))


def write_json(result: BenchResult, destination: str) -> None:
    """To a file, or to standard output when ``destination`` is ``-``.

    Raises:
        InvalidField: the file cannot be written.
    """
    if destination == STDOUT:
        print(result.to_json(), flush=True)
        return
    try:
        Path(destination).write_text(result.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidField("--json", destination, f"cannot be written ({error.strerror})") from error


@dataclass(frozen=True, slots=True)
class Expectation:
    """A bound on a figure, as ``identical_fraction>=1.0`` or ``tie_fraction<=0.01``."""

    figure: str
    operator: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Expectation":
        for operator in (">=", "<="):
            figure, found, bound = text.partition(operator)
            if found:
                try:
                    return cls(figure.strip(), operator, float(bound))
                except ValueError:
                    break
        raise InvalidField("--expect", text, "must read FIGURE>=NUMBER or FIGURE<=NUMBER")

    def failure(self, figures: Mapping[str, float]) -> str | None:
        """Why the figures do not meet it, or None. A missing figure does not meet it."""
        if self.figure not in figures:
            return f"{self.figure} was not measured; there are: {', '.join(sorted(figures))}"
        value = figures[self.figure]
        met = value >= self.bound if self.operator == ">=" else value <= self.bound
        return None if met else f"{self.figure} is {value:.6g}, expected {self.operator} {self.bound:.6g}"


def failures(result: BenchResult, expectations: Sequence[Expectation]) -> list[str]:
    return [text for expectation in expectations if (text := expectation.failure(result.figures)) is not None]
