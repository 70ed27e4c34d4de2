"""Plots a profile: measured points and the three fitted forms."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from profiler.latency import FormComparison, Kind, compare
from profiler.profile import Profile, Surface

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    surfaces = [("verification", profile.step), ("prompt chunk", profile.prefill)]
    for drafter in profile.drafters.values():
        surfaces.append((f"draft: {drafter.label}", drafter.draft))
        if drafter.catch_up is not None:
            surfaces.append((f"draft after catch-up: {drafter.label}", drafter.catch_up))
    num_rows = ceil(len(surfaces) / _NUM_COLUMNS)
    figure = Figure(figsize=(5 * _NUM_COLUMNS, 4 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Sequence[Axes] = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).ravel().tolist()
    for axes, (title, surface) in zip(grid, surfaces, strict=False):
        _plot_surface(axes, title, surface)
    for axes in grid[len(surfaces) :]:
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
