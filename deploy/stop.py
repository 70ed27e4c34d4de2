"""SIGINT and SIGTERM as the exception Stopped, also if other code replaces or swallows it."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal arrived. Not an Exception, so that ``except Exception`` does not catch it."""


class Stop:
    """Whether a signal has arrived. For the main thread."""

    def __init__(self) -> None:
        self.is_requested = False

    def listen(self) -> None:
        """Signals raise Stopped in the main thread from here on."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def check(self) -> None:
        """Raises Stopped if a signal's exception was lost, as in C++ code or a callback."""
        if self.is_requested:
            self.is_requested = False
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        raise Stopped


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Signals raise Stopped in the block; its end catches it, and what interrupted C++ code raises instead of it."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    stop = Stop()
    stop.listen()
    try:
        yield stop
    except BaseException as error:
        # Ray's handler of SIGTERM, installed while it starts, exits with the signal's number.
        by_ray = isinstance(error, SystemExit) and error.code == signal.SIGTERM
        if not (isinstance(error, Stopped) or stop.is_requested or by_ray):
            raise
        logger.debug("stopped by a signal", exc_info=error)
        print("outrider: stopped", file=sys.stderr, flush=True)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
