"""The terminal: tables, steps and progress, which become lines of the log where there is none."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from engine.models.hub import Progress as Reporter

logger = logging.getLogger(__name__)

LOGGED_SHARE = 0.1  # of a download between two lines of a log


def say_step(step: str) -> None:
    """Logs a step of the start, with the age of this process."""
    logger.info("%s (%.1f s)", step, time.time() - psutil.Process().create_time())


def without_colours() -> bool:
    """Whether this process's output must be plain text: NO_COLOR is set, or no terminal shows it."""
    return bool(os.environ.get("NO_COLOR")) or not (sys.stderr.isatty() and sys.stdout.isatty())


def strip_colours() -> None:
    """Removes ANSI codes from what is printed from now on, where they do not belong. Ray colours the lines of its workers
    whatever shows them. Call it after the import of Ray, which has the package."""
    if without_colours():
        import colorama  # type: ignore[import-untyped]

        colorama.init(strip=True)


def table_console() -> Console:
    """Stderr, as wide as the terminal; 160 columns if it is not a terminal."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 160)


@contextmanager
def shown_progress(name: str) -> Iterator[Reporter]:
    """A bar on a terminal, else a line of the log for each tenth."""
    if not sys.stderr.isatty():
        yield _Lines(name)
        return
    columns = (TextColumn("{task.fields[model]} {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=1.0, model=name)
        yield lambda step, fraction: bars.update(task, description=step, completed=fraction)


class _Lines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 0.0

    def __call__(self, step: str, fraction: float) -> None:
        if fraction < self._next or step == "ready":
            return
        self._next = fraction + LOGGED_SHARE
        logger.info("%s: %s, %.0f%%", self._name, step, 100 * fraction)
