"""What comes of a scenario, and pictures of measurements and simulations, whose titles say which."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import InvalidField

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over a common axis, or where ``labels`` are given bars beside each other, a group for each label.

    ``dashed``: the names of series that are drawn so, as what others have published.
    """

    title: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> x, y; of bars x is not used
    x: str = ""
    y: str = ""
    labels: tuple[str, ...] = ()
    log_x: bool = False
    dashed: frozenset[str] = frozenset()


def plot(panels: Sequence[Panel], title: str, path: Path) -> None:
    """As PNG. Raises InvalidField when it cannot be written."""
    from matplotlib.figure import Figure

    num_columns = min(_NUM_COLUMNS, len(panels))
    num_rows = ceil(len(panels) / num_columns)
    figure = Figure(figsize=(5 * num_columns, 4 * num_rows), layout="constrained")
    grid: Sequence[Axes] = figure.subplots(num_rows, num_columns, squeeze=False).ravel().tolist()
    for axes, panel in zip(grid, panels, strict=False):
        (_bars if panel.labels else _lines)(axes, panel)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.legend(frameon=False, fontsize=7)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=100, format="png")
    except OSError as error:
        raise InvalidField("--plot", str(path), f"cannot be written ({error.strerror})") from error


def _lines(axes: "Axes", panel: Panel) -> None:
    for name, (xs, ys) in panel.series.items():
        axes.plot(xs, ys, "--" if name in panel.dashed else "-", label=name, marker="." if len(xs) < 20 else None)
    if panel.log_x:
        axes.set_xscale("log")


def _bars(axes: "Axes", panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for number, (name, (_, ys)) in enumerate(panel.series.items()):
        left = [i - 0.4 + width * (number + 0.5) for i in range(len(panel.labels))]
        axes.bar(left, ys, width, label=name, fill=name not in panel.dashed, edgecolor=f"C{number}")
    axes.set_xticks(range(len(panel.labels)), panel.labels, fontsize=7)


Cell = str | int | float
Said = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people; floats are printed to four significant digits."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Study:
    """``figures`` by the names that documents use; ``panels`` to be drawn."""

    name: str
    figures: dict[str, float]
    tables: tuple[Table, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
