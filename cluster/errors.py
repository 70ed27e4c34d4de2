"""Errors that a caller can act on. Each says what was wrong, with which value, and what to do."""


class OutriderError(Exception):
    """Base of the errors that Outrider raises on purpose."""


class InvalidField(OutriderError, ValueError):
    """A field of a request or of the configuration has a value that cannot be served."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}: {reason}, got {value!r}")
        self.field = field
        self.value = value
        self.reason = reason

    def __reduce__(self) -> tuple[type["InvalidField"], tuple[str, object, str]]:
        return (InvalidField, (self.field, self.value, self.reason))


class ModelUnavailable(OutriderError):
    """A model folder is missing, half-written, or of a kind that is not supported."""


class IncompatibleTokenizer(OutriderError):
    """A drafter's token ids do not mean what the target's mean."""


class GenerationFailed(OutriderError):
    """The target refused a request of an offline generation, or failed on it."""


class Overloaded(OutriderError):
    """A bounded queue is full; try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type["Overloaded"], tuple[str, float]]:
        return (Overloaded, (str(self), self.retry_after_s))


class LinkClosed(OutriderError):
    """The other end of a link is gone."""


class LinkFull(OutriderError):
    """The other end of a link reads too slowly; the message was not queued."""


class WireError(OutriderError):
    """Bytes from a link are not a message, or a message does not fit a link."""


class OutOfBlocks(OutriderError):
    """The KV cache has no free block left."""
