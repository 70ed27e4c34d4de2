"""``outrider bench`` and ``outrider simulate``. They import lazily, so that ``--help`` is instant."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import BENCHES, find_bench

TRACE = "Options of trace"


class Engine(StrEnum):
    NATIVE = "native"
    VLLM = "vllm"


class Dtype(StrEnum):
    AS_SHIPPED = "as-shipped"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def add_commands(app: typer.Typer) -> None:
    app.command(no_args_is_help=True)(bench)
    app.command(no_args_is_help=True)(simulate)


def bench(
    name: Annotated[str, typer.Argument(help=", ".join(BENCHES))],
    more_prompts: Annotated[
        list[Path] | None, typer.Argument(metavar="[PROMPTS]...", help="further files or folders for --prompts")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="finish within 4 minutes on 2 cores")] = False,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE_OR_FOLDER", help="JSONL prompts instead of synthetic ones; may be repeated"),
    ] = None,
    json: Annotated[str, typer.Option(metavar="PATH|-", help="output file of the JSON object; -: standard output")] = "-",
    model: Annotated[str, typer.Option(help="a name of `outrider models`, or a Hugging Face folder")] = "smollm2-135m",
    recording: Annotated[
        Path | None, typer.Option(metavar="NPZ", help="policies: recorded agreement, written where it is missing")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(envvar="OUTRIDER_DATA", metavar="FOLDER", help="folder whose prompts/ is used without --prompts"),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="arms, invariance: the target's engine; vllm in the environment of `make setup-vllm`")
    ] = Engine.NATIVE,
    dtype: Annotated[Dtype | None, typer.Option(help="decode, invariance, serve: the target's target.dtype")] = None,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="faults, burst, soak: over four hosts, made of network namespaces (needs root)")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=TRACE, help="an OpenAI-compatible server, key in OPENAI_API_KEY; default: starts its own"
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(rich_help_panel=TRACE, metavar="CSV", help="recorded arrivals, may be .gz; default: made-up bursts"),
    ] = None,
    rate: Annotated[float, typer.Option(rich_help_panel=TRACE, min=0.01, help="mean requests per second")] = 1.0,
    max_tokens: Annotated[int, typer.Option(rich_help_panel=TRACE, min=1, help="bound on the tokens of an answer")] = 128,
    ttft_ms: Annotated[float, typer.Option(rich_help_panel=TRACE, min=1, help="objective: time to first token")] = 1000.0,
    tpot_ms: Annotated[float, typer.Option(rich_help_panel=TRACE, min=1, help="objective: time per token after it")] = 100.0,
    plot: Annotated[Path, typer.Option(rich_help_panel=TRACE, metavar="PNG", help="output file of the picture")] = Path(
        "outrider-trace.png"
    ),
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", rich_help_panel=TRACE, help="conversations of --trace (JSONL) at two targets")
    ] = False,
    expect: Annotated[
        list[str] | None,
        typer.Option(metavar="FIGURE>=NUMBER", help="exit with 1 unless it is met (>= or <=); may be repeated"),
    ] = None,
) -> None:
    """Run a benchmark: a table on stderr, one JSON object with the figures on stdout."""
    from benchmarks.report import BenchOptions, Expectation, TraceOptions, failures, print_result, write_json
    from cluster.cpu_scheduling import switch_threads_quickly
    from deploy.console import table_console
    from engine.cpu_setup import configure_cpu

    configure_cpu()
    switch_threads_quickly()  # as in processes that serve
    run = find_bench(name).load()
    expectations = [Expectation.parse(text) for text in expect or ()]
    of_trace = TraceOptions(url, trace, rate, max_tokens, ttft_ms, tpot_ms, plot, multi_turn)
    paths = (*(prompts or ()), *(more_prompts or ()))
    result = run(BenchOptions(quick, paths, model, recording, data, engine, hosts, of_trace, dtype))
    console = table_console()
    print_result(result, console)
    write_json(result, json)
    unmet = failures(result, expectations)
    for line in unmet:
        console.print(f"[bold red]not met:[/] {line}", highlight=False)
    if unmet:
        raise typer.Exit(1)


def simulate(
    scenario: Annotated[str, typer.Argument(help="spin, specrouter, a100-70b, h100-32b, h100-405b, or a file")],
    quick: Annotated[bool, typer.Option("--quick", help="a shorter run")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="output file of the picture; default: outrider-SCENARIO.png")
    ] = None,
    json: Annotated[str, typer.Option(metavar="PATH|-", help="output file of the JSON object; -: standard output")] = "-",
    data: Annotated[
        Path | None, typer.Option(envvar="OUTRIDER_DATA", metavar="FOLDER", help="folder of the traces that scenarios name")
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(metavar="FIGURE>=NUMBER", help="exit with 1 unless it is met (>= or <=); may be repeated"),
    ] = None,
) -> None:
    """Simulate hundreds of GPUs with the serving loops on a virtual clock: tables, a picture, figures as JSON."""
    from benchmarks.report import Expectation
    from benchmarks.simulate import run

    if not run(scenario, plot, json, [Expectation.parse(text) for text in expect or ()], quick, data):
        raise typer.Exit(1)
