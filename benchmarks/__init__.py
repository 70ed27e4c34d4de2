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
    "arms": Bench("benchmarks.arms", "drafting as routed beside no drafting and each drafter by name, on one server"),
    "burst": Bench("benchmarks.burst", "a live cluster that grows in a burst and shrinks after it, loses nothing"),
    "compare": Bench("benchmarks.compare", "Outrider beside vLLM and llama.cpp over HTTP, in one run"),
    "decisions": Bench("benchmarks.decisions", "time of decisions in a router's slot and a target's round"),
    "decode": Bench("benchmarks.decode", "a decode step over the floor of its matrix products"),
    "drafters": Bench("benchmarks.drafters", "acceptance and cost of each drafter"),
    "early-exit": Bench("benchmarks.early_exit", "time of passes that rows of rejected drafts leave, over whole passes"),
    "figures": Bench("benchmarks.paper_figures", "figures and bounds of DSpark, MineDraft and Saguaro, simulated"),
    "invariance": Bench("benchmarks.invariance", "equal tokens under any drafting, preemption and faults"),
    "overlap": Bench("benchmarks.overlap", "drafting beside verification over drafting before it, on a server"),
    "policies": Bench("benchmarks.policies", "policies of draft length, verification and overlap, simulated"),
    "profile": Bench("benchmarks.profile", "prediction errors of the cost models for passes and drafts"),
    "serve": Bench("benchmarks.serve", "the HTTP server over the engine in process, and memory"),
    "soak": Bench("benchmarks.soak", "memory and errors at saturation for an hour, then 1,000 streams at once"),
    "structured": Bench("benchmarks.structured", "answers for JSON schemas: valid, ending, the same under drafting"),
    "trace": Bench("benchmarks.trace", "a trace of arrivals against any OpenAI-compatible server: latency, goodput"),
    "faults": Bench("benchmarks.faults", "streams while processes are killed, hang or send invalid messages"),
}


def find_bench(name: str) -> Bench:
    """Raises InvalidField, naming the nearest, if there is no such benchmark."""
    if name in BENCHES:
        return BENCHES[name]
    near = get_close_matches(name, BENCHES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(BENCHES)}"
    raise InvalidField("bench", name, f"no such benchmark, {hint}")
