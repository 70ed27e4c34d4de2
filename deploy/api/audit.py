"""The audit log: who called what, when, and how much it took. It holds no text of prompts or answers."""

import json
import logging
import os
import time
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from cluster.errors import InvalidField
from deploy.api.outcome import Outcome


class AuditLog:
    """One JSON object a line, appended in one write to a file that only its owner can read. Several processes may share it.
    A file that was moved away is begun anew.

    Raises InvalidField: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._handler = _OwnersFile(path, encoding="utf-8")
        except OSError as error:
            reason = f"cannot be written ({type(error).__name__})"
            raise InvalidField("observability.audit_log_file", str(path), reason) from error
        self._logger = logging.Logger("audit")  # in no hierarchy: of this file only
        self._logger.addHandler(self._handler)

    def write(self, outcome: Outcome, now_s: float) -> None:
        """``now_s``: since 1970."""
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s % 1 * 1e3):03d}Z",
            "request_id": outcome.request_id,
            "model": None if outcome.call is None else outcome.call.model,
            **outcome.fields(),
        }
        self._logger.info("%s", json.dumps(line))

    def close(self) -> None:
        self._handler.close()


class _OwnersFile(WatchedFileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening it anew; those of writing it are handled there
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))
