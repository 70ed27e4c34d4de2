"""What comes of a scenario."""

from collections.abc import Callable
from dataclasses import dataclass

from simulator.plots import Panel

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
