"""A trace of arrivals replayed against an OpenAI-compatible server: latency, goodput, attainment, errors."""

import asyncio
import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.compare.bursts import bursty_arrivals, bursty_slice
from benchmarks.load import BenchFailed, percentile
from benchmarks.prompts import choose_prompts
from benchmarks.replay import Chat, Endpoint, Outcome, replay
from benchmarks.report import BenchOptions, BenchResult, Cell, Table, TraceOptions
from benchmarks.serve import local_config
from benchmarks.server import ServerProcess
from cluster.errors import InvalidField
from simulator.serving import read_trace
from simulator.study import Panel, plot

DURATION_S, QUICK_S = 600.0, 60.0  # of the arrivals, at the mean rate
DEADLINE_S, QUICK_DEADLINE_S = 300.0, 60.0  # of a request, from its arrival
MAX_UNDER_WAY = 512  # open connections
SEED = 0
MAX_TIE_S = 3.0  # times of a trace that are rounded to such steps are spread over them
OUTPUT_LEN, OUTPUT_SPREAD = 60.0, 0.8  # of made-up answers: median, and deviation of the logarithm
WARM = Chat(0.0, "warm", "Count from one to eight.", 8)
PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def run(options: BenchOptions) -> BenchResult:
    """Figures, of answers that are whole and counted from the arrival of the request:

    - ``ttft_ms``, ``tpot_ms``, ``e2e_s``: ``.p50``, ``.p90``, ``.p99``;
    - ``goodput_tokens_per_s``: tokens of the requests that met both objectives;
    - ``slo_attainment``: their share of all requests, so that errors and lost requests count as missed;
    - ``num_errors``: answered with an error, of which ``num_refused`` with 429; ``num_lost``: no whole answer came;
    - ``num_held``: arrived when MAX_UNDER_WAY were open; ``late_ms.p99``: from the arrival until it was sent.
    """
    of_trace = options.trace
    if of_trace.multi_turn:
        from benchmarks import conversations

        return conversations.run(options)
    chats = chats_of(options, QUICK_S if options.quick else DURATION_S)
    with ExitStack() as stack:
        if of_trace.url is None:
            Console(stderr=True).print("trace: starting a server", highlight=False)
            endpoint = Endpoint.parse(stack.enter_context(ServerProcess(local_config(options.model))).url, None)
            model = endpoint.served_model(None)
        else:
            endpoint = Endpoint.parse(of_trace.url, os.environ.get("OPENAI_API_KEY") or None)
            model = endpoint.served_model(options.model)
        outcomes = asyncio.run(_play(endpoint, model, chats, QUICK_DEADLINE_S if options.quick else DEADLINE_S))
    result = result_of(outcomes, of_trace)
    plot(panels(outcomes, of_trace), f"measured: {len(chats)} requests of {_name(of_trace)}, {model}", of_trace.plot)
    return result


def chats_of(options: BenchOptions, duration_s: float) -> list[Chat]:
    """Arrivals at the mean rate, prompts of all domains in turn, answers as long as the trace says within the bound.

    Raises:
        InvalidField: the trace or a file of prompts is invalid.
    """
    of_trace = options.trace
    num = max(2, round(of_trace.rate * duration_s))
    if of_trace.file is None:
        rng = random.Random(SEED)
        times = bursty_arrivals(num, of_trace.rate, SEED)
        lengths = [OUTPUT_LEN * rng.lognormvariate(0.0, OUTPUT_SPREAD) for _ in times]
    else:
        rows = list(read_trace(of_trace.file))
        num = min(num, len(rows))
        if num < 2 or rows[0][0] == rows[-1][0]:
            raise InvalidField("--trace", str(of_trace.file), "must have requests at two times or more")
        first, times = bursty_slice(spread_ties([at_s for at_s, _, _ in rows]), num, of_trace.rate)
        lengths = [float(num_tokens) for _, _, num_tokens in rows[first : first + num]]
    prompts = choose_prompts(options.prompts or options.data_prompts, num)
    return [
        Chat(at_s, prompt.domain, prompt.text, min(max(1, round(length)), of_trace.max_tokens))
        for at_s, length, prompt in zip(times, lengths, (prompts[i % len(prompts)] for i in range(num)), strict=True)
    ]


def spread_ties(times: Sequence[float]) -> list[float]:
    """Requests of one rounded moment lie evenly between it and the next, at most MAX_TIE_S later."""
    spread: list[float] = []
    moments = Counter(times)
    for (at_s, num), next_s in zip(moments.items(), [*list(moments)[1:], math.inf], strict=True):
        gap_s = min(next_s - at_s, MAX_TIE_S)
        spread += [at_s + gap_s * i / num for i in range(num)]
    return spread


async def _play(endpoint: Endpoint, model: str, chats: Sequence[Chat], deadline_s: float) -> list[Outcome]:
    """Raises BenchFailed if a first request, which is not counted, gets no answer."""
    (warm,) = await replay(endpoint, model, [WARM], max_under_way=1, deadline_s=deadline_s)
    if not warm.is_whole:
        raise BenchFailed(f"the first request failed: {warm.answer.error}")
    columns = (
        TextColumn("trace"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[num_failed]} failed"),
        TimeElapsedColumn(),
    )
    num_failed = 0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(chats), num_failed=0)

        def ended(outcome: Outcome) -> None:
            nonlocal num_failed
            num_failed += not outcome.is_whole
            bar.update(task, advance=1, num_failed=num_failed)

        return await replay(endpoint, model, chats, max_under_way=MAX_UNDER_WAY, deadline_s=deadline_s, on_end=ended)


def result_of(outcomes: Sequence[Outcome], of_trace: TraceOptions) -> BenchResult:
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    met = _met(outcomes, of_trace)
    failed = [outcome.answer for outcome in outcomes if not outcome.is_whole]
    errors = [answer.error or "" for answer in failed if not answer.is_lost]
    samples = {
        "ttft_ms": [1e3 * outcome.ttft_s for outcome in whole],
        "tpot_ms": _tpot_ms(whole),
        "e2e_s": [outcome.e2e_s for outcome in whole],
    }
    figures: dict[str, float] = {
        f"{name}.{label}": percentile(values, share)
        for name, values in samples.items()
        if values
        for label, share in PERCENTILES.items()
    }
    elapsed_s = max(outcome.end_s for outcome in outcomes) - min(outcome.chat.arrival_s for outcome in outcomes)
    figures |= {
        "goodput_tokens_per_s": sum(outcome.answer.num_tokens for outcome in met) / elapsed_s,
        "tokens_per_s": sum(outcome.answer.num_tokens for outcome in whole) / elapsed_s,
        "slo_attainment": len(met) / len(outcomes),
        "num_requests": len(outcomes),
        "num_errors": len(errors),
        "num_refused": sum(error.startswith("429 ") for error in errors),
        "num_lost": len(failed) - len(errors),
        "num_held": sum(outcome.was_held for outcome in outcomes),
        "late_ms.p99": 1e3 * percentile([outcome.late_s for outcome in outcomes], 0.99),
        "elapsed_s": elapsed_s,
    }
    columns = ("domain", "requests", "p50 TTFT ms", "p50 TPOT ms", "attainment")
    rows = tuple(_row(domain, part, of_trace) for domain, part in _by_domain(outcomes).items())
    causes = Counter((answer.error or "")[:200] for answer in failed).most_common(8)
    return BenchResult(
        bench="trace",
        figures=figures,
        tables=(Table(f"{_name(of_trace)} at {of_trace.rate:g} requests/s", columns, rows),),
        notes=(
            f"objectives: TTFT {of_trace.ttft_ms:g} ms, TPOT {of_trace.tpot_ms:g} ms; picture: {of_trace.plot}",
            *(f"{num} failed: {cause}" for cause, num in causes),
        ),
    )


def panels(outcomes: Sequence[Outcome], of_trace: TraceOptions) -> list[Panel]:
    """Distributions with their objectives, and how the load and the latency went over time."""
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    changes = sorted([(one.chat.arrival_s, 1) for one in outcomes] + [(one.end_s, -1) for one in outcomes])
    times, under_way = [at_s for at_s, _ in changes], list(accumulate(change for _, change in changes))
    arrivals = [outcome.chat.arrival_s for outcome in whole]
    domains = _by_domain(outcomes)
    attained = [len(_met(part, of_trace)) / len(part) for part in domains.values()]
    objective_s = of_trace.ttft_ms / 1e3
    return [
        _distribution("time to first token", "s", [outcome.ttft_s for outcome in whole], objective_s),
        _distribution("time per token after the first", "ms", _tpot_ms(whole), of_trace.tpot_ms),
        _distribution("end to end", "s", [outcome.e2e_s for outcome in whole], None),
        Panel("requests under way", {"requests": (times, under_way)}, "s"),
        Panel("time to first token by arrival", {"s": (arrivals, [outcome.ttft_s for outcome in whole])}, "s", "s"),
        Panel("attainment by domain", {"attainment": ((), attained)}, labels=tuple(name[:8] for name in domains)),
    ]


def _distribution(title: str, unit: str, values: Sequence[float], objective: float | None) -> Panel:
    shares = [(i + 1) / len(values) for i in range(len(values))]
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {"measured": (sorted(values), shares)}
    if objective is not None:
        lines["objective"] = ((objective, objective), (0.0, 1.0))
    return Panel(title, lines, unit, "share of answers", dashed=frozenset({"objective"}))


def _row(domain: str, part: Sequence[Outcome], of_trace: TraceOptions) -> tuple[Cell, ...]:
    whole = [outcome for outcome in part if outcome.is_whole]
    medians = ([1e3 * outcome.ttft_s for outcome in whole], _tpot_ms(whole))
    attained = len(_met(part, of_trace)) / len(part)
    return (domain, len(part), *(percentile(values, 0.5) if values else "-" for values in medians), attained)


def _by_domain(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.chat.domain, []).append(outcome)
    return found


def _met(outcomes: Sequence[Outcome], of_trace: TraceOptions) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.meets(of_trace.ttft_ms / 1e3, of_trace.tpot_ms / 1e3)]


def _tpot_ms(whole: Sequence[Outcome]) -> list[float]:
    return [1e3 * outcome.answer.tpot_s for outcome in whole if outcome.answer.tpot_s is not None]


def _name(of_trace: TraceOptions) -> str:
    return "made-up bursts" if of_trace.file is None else of_trace.file.name
