"""The wall clock may jump: the product reads it to tell people the time, and for nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("cluster", "router", "profiler", "engine", "drafters", "training", "actors", "deploy")

# What each file that reads it does with the time.
READERS = {
    "actors/autoscaler.py": "when replicas were added or removed, for the status",
    "cluster/otlp.py": "times of spans; durations are monotonic",
    "cluster/transport/tls.py": "the expiry that is told while certificates are unusable",
    "deploy/api/chat_template.py": "the date in a prompt, where a model's template asks for it",
    "deploy/api/choice_writer.py": "`created` of an answer",
    "deploy/api/middleware.py": "lines of the audit log",
    "deploy/api/responses.py": "`created_at` of an answer",
    "deploy/api/service.py": "`created` of the model",
    "deploy/console.py": "the age of the process, in the lines of its start",
    "deploy/profiling.py": "when a profile was measured",
    "engine/cpu/quantised.py": "the age of files that a process left half-written",
    "engine/models/manifest.py": "when a model was converted",
    "engine/vllm/target.py": "arrival times that vLLM asks for; its scheduler is first come, first served",
}

_OF_TIME = {"time", "time_ns", "CLOCK_REALTIME"}
_OF_DATES = {"now", "utcnow", "today"}
_WITHOUT_ARGUMENT = {"localtime": 0, "gmtime": 0, "ctime": 0, "strftime": 1}  # arguments with which they read it


def reads(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in _OF_TIME:
                yield f"time.{name}"
            case ast.Attribute(
                value=ast.Name(id="datetime" | "date") | ast.Attribute(attr="datetime" | "date"), attr=name
            ) if name in _OF_DATES:
                yield f"datetime.{name}"
            case ast.ImportFrom(module="time", names=names):
                yield from (f"time.{one.name}" for one in names if one.name in _OF_TIME | _WITHOUT_ARGUMENT.keys())
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name), args=arguments) if _WITHOUT_ARGUMENT.get(
                name
            ) == len(arguments):
                yield f"time.{name}"


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.time()",
        "clock = time.time",
        "time.time_ns()",
        "time.clock_gettime(time.CLOCK_REALTIME)",
        "datetime.now(UTC)",
        "datetime.datetime.utcnow()",
        "date.today()",
        "from time import time",
        "time.strftime('%H')",
        "time.gmtime()",
    ],
)
def test_every_way_to_read_it_is_seen(source: str) -> None:
    assert list(reads(source))


@pytest.mark.parametrize("source", ["time.monotonic()", "time.gmtime(at_s)", "time.strftime('%H', at)", "loop.time()"])
def test_other_clocks_are_no_matter(source: str) -> None:
    assert not list(reads(source))


def test_no_decision_reads_the_wall_clock() -> None:
    files = (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py"))
    assert {str(file.relative_to(ROOT)) for file in files if list(reads(file.read_text("utf-8")))} == set(READERS)
