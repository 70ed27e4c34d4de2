"""What became of an HTTP request, for its span and its line in the log, and the audit log."""

import json
import logging
import os
import time
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from cluster.errors import InvalidField
from deploy.api.call import Call
from deploy.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class Outcome:
    """``call``: None of a request that generates nothing or was refused before. ``error``: came after the status."""

    request_id: str
    method: str
    route: str
    status: int
    duration_s: float
    call: Call | None
    error: ApiError | None
    tenant: str | None = None  # None: unknown

    @property
    def error_type(self) -> str | None:
        if self.error is not None and self.error.code is not None:
            return self.error.code
        return str(self._final_status) if self._final_status >= 400 else None

    @property
    def is_server_error(self) -> bool:
        return self._final_status >= 500

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.call is None else self.call.num_used_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.call is None else self.call.num_output_tokens

    @property
    def finish_reasons(self) -> list[str]:
        """One for each choice."""
        return [] if self.call is None else [choice.outcome.value for choice in self.call.choices]

    @property
    def _final_status(self) -> int:
        return self.status if self.error is None else int(self.error.status)

    def fields(self) -> dict[str, object]:
        """Of the access line."""
        fields: dict[str, object] = {
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "duration_ms": round(self.duration_s * 1e3, 1),
        }
        if self.tenant:
            fields["tenant"] = self.tenant
        if self.error_type is not None:
            fields["error_type"] = self.error_type
        if self.call is not None:
            fields |= {
                "call_id": self.call.id,
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": self.num_output_tokens,
                "finish_reasons": self.finish_reasons,
            }
        return fields


class AuditLog:
    """Who called what, when, and how much it took. It holds no text of prompts or answers.

    One JSON object a line, appended in one write to a file that only its owner can read. Several processes may share it.
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
