"""Benchmarks: ``outrider bench NAME``. Each is a module with ``run(options: BenchOptions) -> BenchResult``."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from cluster.errors import InvalidField

if TYPE_CHECKING:
    from benchmarks.report import BenchOptions, BenchResult


@dataclass(frozen=True, slots=True)
class Bench:
    module: str  # imported when the benchmark runs
    summary: str

    def load(self) -> "Callable[[BenchOptions], BenchResult]":
        run: Callable[[BenchOptions], BenchResult] = import_module(self.module).run
        return run


BENCHES = {
    "decisions": Bench("benchmarks.decisions", "how long a slot of the router and a plan of the round take to decide"),
    "decode": Bench("benchmarks.decode", "a decode step over the floor of its matrix products, and over transformers"),
    "drafters": Bench("benchmarks.drafters", "what each drafter brings and costs, and the speed-up with it"),
    "invariance": Bench("benchmarks.invariance", "the same tokens whatever is drafted, preempted or killed"),
    "profile": Bench("benchmarks.profile", "how well the cost models foresee what passes and drafts take"),
    "record": Bench("benchmarks.record", "what each drafter would propose at every position of answers, into a file"),
    "routing": Bench("benchmarks.routing", "assignment policies on recorded agreement against hindsight, simulated"),
    "serve": Bench("benchmarks.serve", "the HTTP server over the engine in process; memory of the whole cluster"),
    "transport": Bench("benchmarks.transport", "round trips of the data plane between two processes"),
    "faults": Bench("benchmarks.faults", "streams while a drafter is killed"),
}


def find_bench(name: str) -> Bench:
    """Raises InvalidField, naming the nearest, if there is no such benchmark."""
    if name in BENCHES:
        return BENCHES[name]
    near = get_close_matches(name, BENCHES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(BENCHES)}"
    raise InvalidField("bench", name, f"no such benchmark, {hint}")
