"""The console for tables."""

import sys

from rich.console import Console


def table_console() -> Console:
    """Stderr, as wide as the terminal; 160 columns if it is not a terminal."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 160)
