"""Marker of tests that need C kernels: skipped without a C compiler, as with ``CC=none``."""

import os

import pytest

from engine.compiling import find_compiler

_named = os.environ.get("CC")
needs_compiler = pytest.mark.skipif(
    find_compiler() is None,
    reason=f"needs a C compiler: $CC names {_named!r}" if _named else "needs a C compiler: install gcc, or set CC",
)
