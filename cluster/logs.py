"""Logs as JSON, one object a line, with the ids of the request that a line belongs to."""

import json
import logging
import time
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from cluster.config import ObservabilityConfig

# Of the processes of a deployment.
PACKAGES = ("actors", "cluster", "deploy", "drafters", "engine", "profiler", "router")
# Whose lines of level INFO say how far a start is. Other processes than the launcher's log them to its terminal through Ray.
STEPS = ("actors.supervisor", "engine.loading")
_MAX_CAUSES = 8


@dataclass(frozen=True, slots=True)
class RequestIds:
    """``trace_id``: None without tracing."""

    request_id: str
    trace_id: int | None


# Tasks that a request starts inherit it.
current_ids: ContextVar[RequestIds | None] = ContextVar("current_ids", default=None)


class JsonFormatter(logging.Formatter):
    """``extra={"fields": {...}}`` of a record adds fields. Of exceptions only types and frames are written."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (ids := current_ids.get()) is not None:
            line["request_id"] = ids.request_id
            if ids.trace_id is not None:
                line["trace_id"] = f"{ids.trace_id:032x}"
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = frames_of(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)


def without_messages(record: logging.LogRecord) -> bool:
    """A filter: ``frames_of`` writes the record's exception, in every format."""
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = frames_of(record.exc_info[1])
    return True


def log_json() -> None:
    """Writes this process's log to stderr as JSON, from level INFO on. Access lines are of that level."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for package in map(logging.getLogger, PACKAGES):
        package.setLevel(logging.INFO)
        package.addHandler(handler)
        package.propagate = False


def log_as_configured(config: ObservabilityConfig, names: Iterable[str] = STEPS) -> None:
    """As ``log_json``, where ``log_format`` asks for it; else writes the lines of these loggers, and warnings, to stderr."""
    if config.log_format == "json":
        log_json()
        return
    for name in names:
        log_text(name)


def log_text(name: str) -> None:
    """Writes a logger's lines to stderr, from level INFO on."""
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("outrider: %(message)s"))
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]  # also if it is called again


def frames_of(error: BaseException) -> str:
    """Types and frames of an error and its causes, without their messages: those of a defect may quote a prompt."""
    blocks: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(blocks) < _MAX_CAUSES:
        blocks.append(f"{type(cause).__qualname__}\n{''.join(traceback.format_tb(cause.__traceback__))}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "caused by ".join(blocks)
