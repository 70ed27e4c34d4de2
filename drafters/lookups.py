"""Lookups as they are served: in C where it can be compiled, else in Python, which drafts the same in several times that."""

import ctypes
import logging
from functools import cache
from typing import Protocol

from drafters.native.lookup import NativeLookup, load_library
from drafters.protocol import Drafter
from engine.compiling import NoCompiler

logger = logging.getLogger(__name__)


class Lookup(Drafter, Protocol):
    """One in Python that has a form in C."""

    kind: str

    @property
    def settings(self) -> tuple[float, ...]:
        """What its form in C is made with (``drafters.native.lookup``). Addresses are valid as long as this lives."""


def compiled(drafter: Lookup) -> Drafter:
    """The C form of a drafter that follows nobody yet; itself where there is none."""
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
