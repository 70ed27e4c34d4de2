"""The console for tables."""

import logging
import os
import sys
import time

import psutil
from rich.console import Console

logger = logging.getLogger(__name__)


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
