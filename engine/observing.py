"""The seam of observations: what a target measures, traces and learns changes no token, so no error of it ends a round."""

import logging
from types import TracebackType

logger = logging.getLogger(__name__)


class Observing:
    """A context in which an error is counted and logged, each time that their number has doubled, and suppressed. What
    decides tokens, blocks or commits lies outside."""

    def __init__(self) -> None:
        self.num_failed = 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.num_failed += 1
        if self.num_failed & (self.num_failed - 1) == 0:
            text = "a defect: an observation of a round has failed (%d failures since the start)"
            logger.error(text, self.num_failed, exc_info=error)
        return True
