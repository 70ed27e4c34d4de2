"""Errors that a caller can act on. A message says what was wrong, the value, and what to do."""

import copyreg
from typing import Any


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the constructor, whose parameters may differ from ``args``."""
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__)  # type: ignore[attr-defined]


class InvalidField(OutriderError, ValueError):
    """A field of a request or of the configuration has an invalid value."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}: {reason}, got {value!r}")
        self.field = field
        self.value = value
        self.reason = reason


class ModelUnavailable(OutriderError):
    """A model folder is missing, half-written, or of a kind that is not supported."""


class IncompatibleTokenizer(OutriderError):
    """A drafter and the target have different token ids."""


class GenerationFailed(OutriderError):
    """The target refused or failed a request of an offline generation."""


class Overloaded(OutriderError):
    """A bounded queue is full; try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unattainable(Overloaded):
    """An objective of the request cannot be met now; try again after ``retry_after_s``."""


class LinkClosed(OutriderError):
    """The other end of a link is gone."""


class LinkFull(OutriderError):
    """The send queue of a link is full; the message was dropped."""


class WireError(OutriderError):
    """Bytes from a link are no message, or a message does not fit a link."""


class RankLost(OutriderError):
    """Another rank of a tensor parallel target ended, or does not answer."""


class OutOfBlocks(OutriderError):
    """The KV cache has no free block."""
