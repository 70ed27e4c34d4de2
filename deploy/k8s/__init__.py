"""``outrider k8s``: values for the Helm chart in `k8s/chart`, and its manifests."""

from pathlib import Path
from typing import Annotated

import typer

commands = typer.Typer(help="Kubernetes: values and manifests for the Helm chart.", no_args_is_help=True)


@commands.callback()
def k8s() -> None: ...


@commands.command()
def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration file (YAML), as `outrider serve` takes it.")],
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Image with its tag.", show_default="the chart's")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.5, help="CPUs of a target's rank without GPU, if the file has none.")] = 4,
    secret: Annotated[
        str,
        typer.Option(metavar="NAME", help="Secret with the keys and passwords of the file; NAME-tls: with its certificate."),
    ] = "outrider",
    models_claim: Annotated[str, typer.Option(metavar="NAME", help="Volume claim with models, for /models.")] = "",
    model_gb: Annotated[
        list[str],
        typer.Option(metavar="MODEL=GB", help="Weights of a model whose folder is not on this machine; may be repeated."),
    ] = [],  # noqa: B006
    manifest: Annotated[bool, typer.Option("--manifest", help="Print the manifests of the chart, not its values.")] = False,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the release in the manifests.")] = "outrider",
) -> None:
    """Print Helm values for a configuration file.

    Targets, and each kind of drafter, get a worker group with the CPUs, GPUs and memory that the file asks for:

    outrider k8s render FILE >values.yaml && helm upgrade --install NAME k8s/chart --values values.yaml
    """
    import yaml

    from cluster.config import load
    from deploy.k8s.render import Options, values_for
    from deploy.k8s.render import manifest as manifest_of
    from drafters.shipped import with_shipped

    sizes = dict(map(_model_gb, model_gb))
    options = Options(cpus=cpus, secret=secret, models_claim=models_claim, image=image, model_gb=sizes)
    values = values_for(with_shipped(load(file)), options)
    text = manifest_of(values, name) if manifest else yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    print(text, end="")


def _model_gb(text: str) -> tuple[str, float]:
    model, _, size = text.rpartition("=")
    try:
        gb = float(size)
    except ValueError:
        gb = 0.0
    if not model or not 0 < gb < float("inf"):
        raise typer.BadParameter(f"must be MODEL=GB with a positive number, got {text!r}", param_hint="--model-gb")
    return model, gb
