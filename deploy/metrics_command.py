"""``outrider metrics``."""

import typer

commands = typer.Typer(help="Metrics: their list, and the Grafana dashboard.", no_args_is_help=True)


@commands.command("list")
def list_metrics() -> None:
    """Print a Markdown table of all metrics of /metrics, as docs/metrics.md has it."""
    print(page(), end="")


@commands.command()
def dashboard() -> None:
    """Print the Grafana dashboard of all metrics, with the panels of each drafter first, as JSON."""
    from deploy.grafana import dashboard as make

    print(make(), end="")


def page() -> str:
    """Markdown, by section."""
    from deploy.api.metric_table import METRICS

    lines = [
        "# Metrics",
        "",
        "All metrics of `/metrics`, printed by `outrider metrics list` from `deploy/api/metric_table.py`. Counters end in",
        "`_total`; histograms are exported as `_bucket`, `_sum` and `_count`.",
        "",
        "| metric | kind | labels | meaning | vLLM's name |",
        "|---|---|---|---|---|",
        "| `outrider_cluster_up` | gauge | | 1 if the cluster answers, else 0. | |",
    ]
    for row in METRICS:
        name = f"`outrider_{row.name}{'_total' if row.kind == 'counter' else ''}`"
        labels = ", ".join(f"`{label}`" for label in row.labels)
        vllm = ", ".join(f"`vllm:{other}{'_total' if row.kind == 'counter' else ''}`" for other in row.vllm)
        lines.append("| " + " | ".join((name, row.kind, labels, row.text, vllm)) + " |")
    return "\n".join(lines) + "\n"
