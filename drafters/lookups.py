"""Lookups as served: in C where it compiles, else in Python, which drafts the same several times slower."""

import ctypes
import logging
from functools import cache
from typing import Protocol

from drafters.native.lookup import NativeLookup, load_library
from drafters.protocol import Drafter
from engine.compiling import NoCompiler

logger = logging.getLogger(__name__)


class Lookup(Drafter, Protocol):
    """A Python lookup with a C implementation."""

    kind: str

    @property
    def settings(self) -> tuple[float, ...]:
        """Arguments of its C implementation (``drafters.native.lookup``). Addresses are valid while this lives."""


def compiled(drafter: Lookup) -> Drafter:
    """The C implementation of a drafter that follows nobody yet, or the drafter itself where there is none."""
    library = _library()
    if library is None:
        return drafter
    return NativeLookup(library, drafter.kind, *drafter.settings, keep=drafter)


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return load_library()
    except NoCompiler as error:
        logger.warning("lookups cannot be compiled, they will take several times longer: %s", error)
        return None
