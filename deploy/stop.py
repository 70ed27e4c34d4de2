"""SIGINT and SIGTERM as one exception, which code on the way may mangle or swallow without being believed."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asks to end. Not an Exception, so that nothing on the way mistakes it for a failure."""


class Stop:
    """Whether a signal has come. For the main thread."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """From here on a signal raises Stopped, wherever the main thread is."""
        for number in SIGNALS:
            signal.signal(number, self._ask)

    def check(self) -> None:
        """Raises Stopped when a signal has come whose exception was lost: in C++ code, or in a callback, it may be."""
        if self.asked:
            self.asked = False
            raise Stopped

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise Stopped


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Within, a signal raises Stopped; it ends here. So does what becomes of it on the way: code in C++ that is interrupted
    turns it into errors of its own, which then are no failures."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    stop = Stop()
    stop.listen()
    try:
        yield stop
    except BaseException as error:
        # The handler of SIGTERM that Ray installs while it starts exits with the signal's number.
        by_ray = isinstance(error, SystemExit) and error.code == signal.SIGTERM
        if not (isinstance(error, Stopped) or stop.asked or by_ray):
            raise
        logger.debug("stopped by a signal", exc_info=error)
        print("outrider: stopped", file=sys.stderr, flush=True)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
