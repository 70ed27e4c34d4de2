"""``outrider profile``: measures, shows, plots and stores the latencies of a configuration's target and drafters."""

from functools import partial
from pathlib import Path

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
from profiler.latency import FORMS
from profiler.profile import Profile, Surface, save_profile, usable_profile
from profiler.profile_plot import plot_profile


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
    from engine.loading import identity_of, prepare_partition
    from engine.threads import in_own_thread

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
    links = Table("link", "p50 us", "p99 us")
    for name, trip in profile.transport.items():
        links.add_row(name, f"{1e6 * trip.p50_s:.0f}", f"{1e6 * trip.p99_s:.0f}")
    console.print(links)


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
