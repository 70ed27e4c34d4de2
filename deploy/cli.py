"""``outrider``: the command line. Commands import what they need when they run, so that ``--help`` is instant."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cluster.errors import InvalidField, OutriderError


class _OneLineErrors(TyperGroup):
    """An error that a user can act on is one line on stderr and exit code 1; others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            print(f"outrider: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_OneLineErrors,
    help="Serve a large language model through a pool of small draft models that ride ahead of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print it and exit")
    ] = False,
) -> None: ...


Url = Annotated[str, typer.Option(help="of the server")]
ApiKey = Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="where the server asks for one")]
ConfigFile = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="YAML; without one, the defaults of a laptop")]


@app.command()
def serve(
    file: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="instead of the file's: a known name, or a folder")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="instead of the file's")] = None,
) -> None:
    """Bring up the cluster and its OpenAI API; Ctrl-C ends all of it."""
    from cluster.config import Config, load
    from deploy.launch import serve as launch
    from drafters.shipped import with_shipped

    config = load(file) if file is not None else Config()
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": model})})
    if port is not None:
        config = config.model_copy(update={"api": config.api.model_copy(update={"port": port})})
    launch(with_shipped(config))


@app.command()
def config(file: ConfigFile = None) -> None:
    """Check a configuration file and print all that it means, defaults included."""
    from cluster.config import Config, load, show
    from drafters.shipped import with_shipped

    print(show(with_shipped(load(file) if file is not None else Config())), end="")


@app.command()
def chat(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="the system message", show_default="none")] = None,
    drafting: Annotated[str, typer.Option(metavar="NAME", help="auto, off, or a drafter")] = "auto",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="of an answer", show_default="what fits, at most 2048")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, metavar="NUMBER", help="of sampling; 0 is greedy")] = 0.3,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="of sampling", show_default="another for each answer")
    ] = None,
) -> None:
    """Chat in the terminal; drafted words are coloured, and every answer ends with its acceptance."""
    from deploy.chat import chat as converse

    converse(
        url,
        api_key=api_key,
        system=system,
        drafting=drafting,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )


@app.command()
def status(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="print one snapshot and exit, as a pipe or a file gets")] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON object a line, for programs")] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="between two updates")] = 1.0,
) -> None:
    """Show targets, drafters, requests and acceptance: live on a terminal until Ctrl-C, once elsewhere."""
    from rich.console import Console

    from deploy.status import watch

    watch(url, api_key, once=once, json=json, interval_s=every, console=Console())


@app.command()
def profile(
    file: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="instead of the file's: a known name, or a folder")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer points, fewer times")] = False,
    plot: Annotated[Path, typer.Option(metavar="PNG", help="where it is drawn")] = Path("outrider-profile.png"),
) -> None:
    """Measure what the target and the drafters cost on this machine, and store it: serving then knows from the start."""
    from cluster.config import Config, load
    from deploy.profile import run

    config = load(file) if file is not None else Config()
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": model})})
    run(config, plot, quick)


def _add_laboratory() -> None:
    """``bench`` and ``simulate`` come from ``benchmarks/``, which a checkout has and an installed package has not."""
    if find_spec("benchmarks") is not None:
        import_module("benchmarks.cli").add_commands(app)
        return
    for name in ("bench", "simulate"):

        @app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
        def absent(context: typer.Context) -> None:
            raise InvalidField("command", context.info_name, "is part of a checkout of the repository: run it there")


@app.command()
def train(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="where the drafter goes; its name is the drafter's")],
    drafter: Annotated[str, typer.Option(help="dspark, layers or table")] = "dspark",
    model: Annotated[str, typer.Option(help="a name of `outrider models`, or a Hugging Face folder")] = "smollm2-135m",
    work: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="prompts, answers and checkpoints; by default beside the drafter")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help='JSONL with a "prompt" a line; may be repeated')
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=0, help="that the target writes itself")] = 2000,
    tokens: Annotated[int, typer.Option(min=1, help="of answers, at temperature 0 and 0.7")] = 1_000_000,
    begin_with: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="go on with a trained dspark drafter, of its shape; shipped ones by name"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    learning_rate: Annotated[float, typer.Option(help="lower to go on with a drafter")] = 2.5e-4,
    layers: Annotated[int | None, typer.Option(min=1, help="of the drafter; 2 by default")] = None,
    block: Annotated[int | None, typer.Option(min=1, max=64, help="tokens that dspark drafts at once; 7 by default")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=2, help="tokens that can be drafted; 16384 by default")] = None,
    budget_minutes: Annotated[
        float | None, typer.Option(min=0.1, help="for all of it, divided between writing and training")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="of dspark, over the tokens of a block: markov, gated or rnn; markov by default")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a rehearsal of every step, in minutes on a CPU")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; several GPUs: start it with torchrun")] = "auto",
    dtype: Annotated[str, typer.Option(help="of the target: bfloat16 or float32")] = "bfloat16",
    data: Annotated[
        Path | None,
        typer.Option(envvar="OUTRIDER_DATA", metavar="FOLDER", help="whose folder prompts/ is for evaluation alone"),
    ] = None,
) -> None:
    """Train a drafter for a model: its own prompts and answers, distillation, evaluation, card. Resumes where it was."""
    from deploy.train import run

    run(
        model=model,
        drafter=drafter,
        out=out,
        work=work,
        prompts=tuple(prompts or ()),
        num_prompts=num_prompts,
        num_tokens=tokens,
        begin_with=begin_with,
        num_epochs=epochs,
        learning_rate=learning_rate,
        num_layers=layers,
        block_size=block,
        vocabulary=vocabulary,
        budget_minutes=budget_minutes,
        quick=quick,
        seed=seed,
        head=head,
        device=device,
        dtype=dtype,
        data_folder=data,
    )


_add_laboratory()


models = typer.Typer(help="The models that are known by name, and getting them ready.", invoke_without_command=True)
app.add_typer(models, name="models")


@models.callback()
def list_unless_asked(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models()


@models.command("list")
def list_models() -> None:
    """Which there are, and whether they are ready."""
    from engine.models.prepare import CATALOGUE, model_folder, state_of

    for model in CATALOGUE.values():
        print(f"{model.name}  {state_of(model.name)}\n    {model.summary}\n    {model_folder(model.name)}")
    print("\nA Hugging Face folder of the Llama family serves as well.")


@models.command()
def prepare(name: Annotated[str, typer.Argument(help="a name of `outrider models list`, or a folder to check")]) -> None:
    """Convert a model into the cache folder, once; of one that is there, check every byte. Prints the folder."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from engine.models.prepare import ensure_model

    columns = (TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=1.0)
        folder = ensure_model(name, lambda step, fraction: bar.update(task, description=step, completed=fraction))
    print(folder)


if __name__ == "__main__":
    app()
