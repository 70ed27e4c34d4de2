"""``outrider``: the command line. Commands import their modules when they run, so that ``--help`` is instant."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cluster.errors import InvalidField, OutriderError
from deploy.k8s import commands as k8s
from deploy.vllm_flags import help_text

if TYPE_CHECKING:
    from cluster.config import Config
    from deploy.command_line import CommandLine


class _OneLineErrors(TyperGroup):
    """Prints an OutriderError as one line on stderr, with exit code 1; other errors keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            print(f"outrider: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_OneLineErrors,
    help="Serve a large language model with speculative decoding: a pool of draft models, an OpenAI-compatible API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


Url = Annotated[str, typer.Option(help="URL of the server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="API key, if the server needs one.")]
ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="Configuration file (YAML). Default: SmolLM2-135M on this machine."),
]
ModelName = Annotated[
    str | None, typer.Option(help="Model, overrides the file: a name of `outrider models` or a Hugging Face folder.")
]


def _configuration(file: Path | None, model: str | None = None) -> "Config":
    from cluster.config import Config, load

    if file is not None and (file.is_dir() or not file.exists()):
        what = "is a folder and must be a configuration file" if file.is_dir() else "the file does not exist"
        raise InvalidField("FILE", str(file), f"{what}; `--model` names a model")
    config = load(file) if file is not None else Config()
    _check_engine(config)
    if model is None:
        return config
    return config.changed(model={"name": model})


def _check_engine(config: "Config") -> None:
    from engine.vllm.arguments import check_names
    from engine.vllm.environment import require_vllm

    if config.target.engine == "vllm":
        require_vllm()
        check_names(config.target.vllm)


_FLAGS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "options_metavar": "[MODEL_OR_FILE] [FLAGS]",
}


_SERVE_HELP = f"""Start the OpenAI-compatible API server, with its targets and drafters.

MODEL_OR_FILE is ORG/MODEL[@REVISION] or ORG/MODEL:Q4_K_M of the hub, FILE.gguf, a folder, a name of `outrider models`, or
a configuration file (YAML). Default: SmolLM2-135M on this machine.

Flags are those of `vllm serve`. Most set a field of the file; those of vLLM's engine without a field are passed on to it.

\b
{help_text()}

`outrider config` takes the same and prints every setting. Ctrl-C drains running requests, then stops everything.
"""


@app.command(**_FLAGS, help=_SERVE_HELP)
def serve(context: typer.Context) -> None:
    from deploy.launch import serve as launch
    from drafters.shipped import with_shipped

    config, line = _configured(context.args)
    with _key_file(line.api_keys) as file:
        if file is not None:
            config = config.changed(api={"api_keys_file": file})
        launch(with_shipped(config))


@app.command(**_FLAGS)
def config(
    context: typer.Context,
    command: Annotated[
        str | None,
        typer.Option("--from", metavar="COMMAND", help="A command line of `vllm serve`, to be written as a file."),
    ] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print every setting with its default and meaning: docs/settings.yaml.")
    ] = False,
) -> None:
    """Validate a configuration, given as to `outrider serve`, and print every setting, with defaults."""
    from cluster.config import show
    from drafters.shipped import with_shipped

    if reference:
        from cluster.config.reference import reference as of_settings

        print(of_settings(), end="")
        return
    if command is not None:
        from deploy.command_line import as_file

        print(as_file(command), end="")
        return
    print(show(with_shipped(_configured(context.args)[0])), end="")


def _configured(words: list[str]) -> "tuple[Config, CommandLine]":
    from cluster.config import with_fields
    from deploy.command_line import parse

    line = parse(words)
    for note in line.notes:
        print(f"outrider: {note}", file=sys.stderr)
    base = _configuration(Path(line.file) if line.file is not None else None)
    config = with_fields(base, line.fields, line.settings) if line.fields or line.settings else base
    _check_engine(config)
    return config, line


@contextmanager
def _key_file(keys: list[str]) -> Iterator[Path | None]:
    """A private file of the keys on the command line, while the server runs."""
    if not keys:
        yield None
        return
    with NamedTemporaryFile("w", prefix="outrider-keys-") as file:  # mode 0600
        file.write("\n".join(keys))
        file.flush()
        yield Path(file.name)


@app.command()
def chat(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.", show_default="none")] = None,
    drafting: Annotated[str, typer.Option(metavar="NAME", help="auto, off, or the name of a drafter.")] = "auto",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum tokens.", show_default="what fits")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, metavar="NUMBER", help="Sampling temperature; 0 is greedy.")
    ] = 0.3,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Sampling seed.", show_default="random")] = None,
) -> None:
    """Chat with a running server. Drafted text is coloured by drafter; each answer ends with its acceptance rate."""
    from deploy.chat import chat as converse

    sampling = {"max_completion_tokens": max_tokens, "temperature": temperature, "seed": seed}
    converse(url, api_key, system, drafting, {name: value for name, value in sampling.items() if value is not None})


@app.command()
def status(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit (default without a terminal).")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Update interval.")] = 1.0,
) -> None:
    """Show targets, drafters, requests and acceptance rates of a running server, live."""
    from rich.console import Console

    from deploy.status import watch

    watch(url, api_key, once=once, json=json, interval_s=every, console=Console())


@app.command()
def scale(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The deployment's configuration file (YAML).")],
    targets: Annotated[int, typer.Option(min=1, help="Replicas of the target.")],
    drafter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="Replicas of a drafter; may be repeated.")
    ] = None,
) -> None:
    """Change the number of replicas of a deployment that runs on a Ray cluster, within the bounds of its file."""
    from deploy.scale import parse_drafters
    from deploy.scale import scale as resize

    size = resize(_configuration(file), targets, parse_drafters(drafter or ()))
    drafters = "".join(f", {name} {num}" for name, num in size.num_drafters.items())
    print(f"targets {size.num_targets}{drafters}")


@app.command()
def drafter(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration file (YAML), for its model and drafters.")],
    listen: Annotated[str, typer.Option(metavar="URL", help="grpc://HOST:PORT or unix:///PATH.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The drafter.", show_default="the only one of the file")
    ] = None,
) -> None:
    """Run one drafter, for vLLM servers with OUTRIDER_DRAFTER_URL."""
    from deploy.drafter import serve_drafter

    serve_drafter(_configuration(file), name, listen)


@app.command()
def profile(
    file: ConfigFile = None,
    model: ModelName = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer points, less often.")] = False,
    plot: Annotated[Path, typer.Option(metavar="PNG", help="File of the plot.")] = Path("outrider-profile.png"),
) -> None:
    """Measure target and drafter latencies on this machine and store them for `serve`."""
    from deploy.profile_command import run

    run(_configuration(file, model), plot, quick)


def _add_laboratory() -> None:
    """``bench`` and ``simulate`` are in ``benchmarks/``, which is part of a checkout but not of an installed package."""
    if (Path(__file__).parents[1] / "benchmarks" / "cli.py").is_file():  # not another package of that name
        import_module("benchmarks.cli").add_commands(app)
        return
    for name in ("bench", "simulate"):

        @app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
        def absent(context: typer.Context) -> None:
            raise InvalidField("command", context.info_name, "needs a checkout of the repository: run it there")


@app.command()
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; its name is the drafter's name.")],
    drafter: Annotated[str, typer.Option(help="Kind of drafter: dspark, dflash, eagle3, layers or table.")] = "dspark",
    model: Annotated[
        str, typer.Option(help="Target model: a name of `outrider models` or a Hugging Face folder.")
    ] = "smollm2-135m",
    work: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Prompts, answers and checkpoints.", show_default="OUT-work")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help='Prompts: JSONL with "prompt" per line. Can be repeated.')
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=0, help="Number of prompts that the target generates.")] = 2000,
    num_tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Answer tokens to generate, at temperatures 0 and 0.7.")
    ] = 1_000_000,
    begin_with: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Continue a block drafter: a folder, or a shipped one's name.")
    ] = None,
    num_epochs: Annotated[int, typer.Option("--epochs", min=1, help="Training epochs.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Learning rate; use a lower one with --begin-with.")] = 2.5e-4,
    num_layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the drafter.")] = 2,
    block_size: Annotated[int, typer.Option("--block", min=1, max=64, help="Tokens of a block.")] = 7,
    vocabulary: Annotated[int, typer.Option(min=2, help="Size of the draft vocabulary.")] = 16384,
    budget_minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Time limit for generating answers and training together.")
    ] = None,
    head: Annotated[str, typer.Option(help="Sequential head of a block drafter: markov, gated or rnn.")] = "markov",
    speculators: Annotated[
        bool, typer.Option("--speculators", help="Write a block drafter in the speculators format.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Run every step on little data, in minutes on a CPU.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. Use torchrun for several GPUs.")] = "auto",
    dtype: Annotated[str, typer.Option(help="dtype of the target: bfloat16 or float32.")] = "bfloat16",
    data_folder: Annotated[
        Path | None,
        typer.Option(
            "--data", envvar="OUTRIDER_DATA", metavar="FOLDER", help="Evaluation data: its prompts/ is never trained on."
        ),
    ] = None,
) -> None:
    """Train a drafter for a model.

    Generates prompts and answers with the model, distils the drafter, evaluates it and writes its model card.
    A stopped training resumes when the same command is run again.
    """
    from deploy.train import run

    given = [name for name in context.params if getattr(context.get_parameter_source(name), "name", None) != "DEFAULT"]
    run(asked=frozenset(given), **context.params)


_add_laboratory()
app.add_typer(k8s, name="k8s")


metrics = typer.Typer(help="Metrics: their list, and the Grafana dashboard.", no_args_is_help=True)
app.add_typer(metrics, name="metrics")


@metrics.command("list")
def list_metrics() -> None:
    """Print a Markdown table of all metrics of /metrics, as docs/metrics.md has it."""
    from deploy.api.metric_table import page

    print(page(), end="")


@metrics.command()
def dashboard() -> None:
    """Print the Grafana dashboard of all metrics, with the panels of each drafter first, as JSON."""
    from deploy.grafana import dashboard as make

    print(make(), end="")


models = typer.Typer(help="List and prepare the embedded models.", invoke_without_command=True)
app.add_typer(models, name="models")


@models.callback()
def list_by_default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models()


@models.command("list")
def list_models() -> None:
    """List the embedded models and whether they are prepared."""
    from engine.models.prepare import CATALOGUE, model_folder, state_of

    for model in CATALOGUE.values():
        print(f"{model.name}  {state_of(model.name)}\n    {model.summary}\n    {model_folder(model.name)}")
    print("\nHugging Face folders and GGUF files of the Llama family, also of the hub, can be served, too.")


@models.command()
def prepare(
    name: Annotated[
        str, typer.Argument(help="A name of `outrider models list`, ORG/MODEL of the hub, a GGUF file, or a folder.")
    ],
) -> None:
    """Convert or download a model into the cache, or verify one that is there. Prints the folder."""
    from deploy.console import shown_progress
    from engine.models.prepare import ensure_model

    with shown_progress(name) as progress:
        folder = ensure_model(name, progress)
    print(folder)


if __name__ == "__main__":
    app()
