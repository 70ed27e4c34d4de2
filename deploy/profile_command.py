"""``outrider profile``: measures, shows, plots and stores the latencies of a configuration's target and drafters."""

from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from actors.worker import set_threads
from cluster.config import Config
from cluster.resolve import resolve
from cluster.state import open_store
from deploy.console import table_console
from deploy.memory import sized
from deploy.model_files import with_files
from drafters.shipped import with_shipped
from engine.cpu_setup import configure_cpu
from engine.dtypes import resolve_dtypes
from engine.model_facts import read_facts
from engine.models.prepare import resolve_model
from profiler.hardware import here, num_cores
from profiler.latency import FORMS, FormComparison, Kind, compare
from profiler.profile import Profile, Surface, save_profile, usable_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"linear": ":", "piecewise": "--", "table": "-"}
_AXES = {
    Kind.PASS: ("rows", "context"),
    Kind.DRAFT: ("batch", "draft tokens"),
    Kind.CATCH_UP: ("tokens to catch up with", ""),
}
_NUM_COLUMNS = 3


def plot_profile(profile: Profile, path: Path) -> None:
    """Writes a PNG. Bars are interquartile ranges; the chosen form is drawn bold."""
    from matplotlib.figure import Figure

    named = surfaces(profile)
    num_rows = ceil(len(named) / _NUM_COLUMNS)
    figure = Figure(figsize=(5 * _NUM_COLUMNS, 4 * num_rows), layout="constrained")
    grid: Sequence[Axes] = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).ravel().tolist()
    for axes, (title, surface) in zip(grid, named.items(), strict=False):
        _plot_surface(axes, title, surface)
    for axes in grid[len(named) :]:
        axes.set_axis_off()
    identity = profile.identity
    where = f"{identity.hardware}, {identity.threads} threads" if identity.device == "cpu" else identity.hardware
    figure.suptitle(f"{identity.model.rsplit('/', 1)[-1]}, {identity.dtype}, {where}, {profile.measured_at}")
    figure.savefig(path, dpi=100)


def _plot_surface(axes: "Axes", title: str, surface: Surface) -> None:
    found: FormComparison = compare(surface.kind, surface.points)
    for number, y in enumerate(sorted({sample.y for sample in surface.samples})):
        colour = f"C{number}"
        samples = [sample for sample in surface.samples if sample.y == y]
        milliseconds = np.array([1e3 * sample.seconds for sample in samples])
        half_iqr = milliseconds * [sample.spread / 2 for sample in samples]
        name = f"{_AXES[surface.kind][1]} {y}" if _AXES[surface.kind][1] else None
        axes.errorbar([s.x for s in samples], milliseconds, half_iqr, fmt="o", markersize=3, color=colour, label=name)
        xs = np.unique(np.geomspace(max(1, samples[0].x), samples[-1].x, 60).astype(int)).tolist()
        for form, fit in found.fits.items():
            width = 1.6 if form == surface.fit.form else 0.8
            axes.plot(xs, [1e3 * fit.at(x, y) for x in xs], _STYLES[form], color=colour, linewidth=width)
    for form, style in _STYLES.items():
        axes.plot([], [], style, color="0.3", label=f"{form}, held-out error {surface.mape[form]:.1%}")
    axes.set(xscale="log", yscale="log", xlabel=_AXES[surface.kind][0], ylabel="ms", title=title)
    axes.legend(frameon=False, fontsize=7)


def run(config: Config, plot: Path, quick: bool) -> None:
    """Prints the key of the stored profile. Raises OutriderError: a model, the machine or the state store is unfit."""
    configure_cpu()
    set_threads(num_cores())  # before torch is imported; each measurement sets its own number
    config = with_files(with_shipped(config))  # whose commit is part of the profile's key
    facts = read_facts(config, resolve_model(config.model.name, config.target.engine))
    machine = here()
    config = resolve_dtypes(resolve(config, machine, facts.useful_threads))
    config = sized(config, facts, machine.nodes[0].gpu_bytes)
    from deploy.profiling import ProfileEffort, measure_profile
    from engine.cpu_setup import in_own_thread
    from engine.loading import identity_of, prepare_partition

    console = table_console()
    store = open_store(config.cluster.state, config.cluster.namespace)
    try:
        usable_profile(store, identity_of(config))  # logs why an existing profile is unusable
        columns = (TextColumn("{task.description:20}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            effort = ProfileEffort.of(quick)

            def report(step: str, share: float) -> None:
                bar.update(task, description=step, completed=share)

            profile = measure_profile(config, effort, report)
            version = save_profile(store, profile)
            partition = prepare_partition(config)
            for split in () if partition is None else partition.splits:
                save_profile(store, in_own_thread(partial(measure_profile, config, effort, report, split)))
    finally:
        store.close()
    show(profile, console)
    plot_profile(profile, plot)
    console.print(f"version {version}, plotted in {plot}", highlight=False)
    print(profile.identity.key)


def show(profile: Profile, console: Console) -> None:
    table = Table("surface", "points", "least ms", "most ms", "spread", *(f"error {form}" for form in FORMS), "chosen")
    for name, surface in surfaces(profile).items():
        table.add_row(name, *row(surface))
    console.print(table)


def surfaces(profile: Profile) -> dict[str, Surface]:
    """The profile's surfaces by label."""
    found = {"verification": profile.step, "prompt chunk": profile.prefill}
    for drafter in profile.drafters.values():
        found[f"draft: {drafter.label}"] = drafter.draft
        if drafter.catch_up is not None:
            found[f"draft after catch-up: {drafter.label}"] = drafter.catch_up
    return found


def row(surface: Surface) -> tuple[str, ...]:
    """A table row: points, least and most ms, median spread, errors (MAPE on held-out points), chosen form."""
    seconds = [sample.seconds for sample in surface.samples]
    spreads = sorted(sample.spread for sample in surface.samples)
    return (
        str(len(seconds)),
        f"{1e3 * min(seconds):.3g}",
        f"{1e3 * max(seconds):.3g}",
        f"{spreads[len(spreads) // 2]:.1%}",
        *(f"{surface.mape[form]:.1%}" for form in FORMS),
        surface.fit.form,
    )
