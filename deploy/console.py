"""Where tables are printed."""

import sys

from rich.console import Console


def table_console() -> Console:
    """Stderr, as wide as its terminal; elsewhere wide enough for every table."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 160)
