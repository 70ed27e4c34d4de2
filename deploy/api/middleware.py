"""Outermost middleware: request ids, metrics, limits on calls and on slow readers, CORS, and unhandled errors; and what
became of a request, for its span, its line in the log, and the audit log."""

import asyncio
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.errors import InvalidField, OutriderError
from cluster.logs import RequestIds, current_ids, without_messages
from deploy.api.call import Call
from deploy.api.dashboard.pages import SETTINGS, page_paths
from deploy.api.errors import ApiError, ClientGone, internal_error, is_anthropic, overloaded
from deploy.api.metrics import Metrics
from deploy.api.settings import ApiSettings
from deploy.api.tenants import BUDGET_HEADERS, NOBODY
from router.planning.fair_share import SharedLimit

if TYPE_CHECKING:
    from deploy.api.tracing import Tracing


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


_logger = logging.getLogger(__name__)
_logger.addFilter(without_messages)
_access = logging.getLogger("deploy.api.access")

CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that disconnected
# Neither counted nor refused: probes, scrapes and documentation, which an overloaded server must still answer.
_UNLIMITED = frozenset(
    {"/health", "/ping", "/load", "/metrics", "/version", "/openapi.json", "/docs", SETTINGS, *page_paths()}
)
_VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
WARNING_HEADER = "x-outrider-warning"
_MAX_NAMED = 8


class AnswerCutOff(OutriderError):
    """An answer that had begun cannot be completed. The reason is logged before."""


class Boundary:
    """ASGI middleware. In ``request.state``: ``request_id``, the client's ``x-request-id`` if valid; ``unknown_fields`` and
    ``fields_without_effect``, which WARNING_HEADER names; ``budget_headers``, which are added; ``holder``, whose call of
    ``calls`` is given back."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        settings: ApiSettings,
        calls: SharedLimit,
        tracing: "Tracing | None" = None,
        audit: AuditLog | None = None,
    ) -> None:
        self._app = app
        self._audit = audit
        self._tracing = tracing
        self._metrics = metrics
        self._retry_after_s = settings.retry_after_s
        self._calls = calls
        self._max_calls = settings.max_calls
        self._stall_timeout_s = settings.stall_timeout_s
        self._num_calls = 0  # with those whose tenant is not known yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # as GET, whose body the server leaves out
            scope = {**scope, "method": "GET"}
        request_id = _request_id(scope)
        arrival_s = time.monotonic()
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, arrival_s=arrival_s)
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode()), *state.get("budget_headers", ())]
                if is_anthropic(scope["path"]):
                    added.append((b"request-id", request_id.encode()))
                message["headers"] = [*message.get("headers", ()), *added]
                if warning := _warning(state):
                    message["headers"].append((WARNING_HEADER.encode(), warning.encode("ascii")))
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await send(message)
            except TimeoutError as error:
                raise ClientGone from error

        counted = scope["path"] not in _UNLIMITED
        span = None
        if self._tracing is not None and counted:
            span = self._tracing.begin(scope)
            state["trace"] = self._tracing.parent_of(span)
        ids = current_ids.set(RequestIds(request_id, None if span is None else span.get_span_context().trace_id))
        self._metrics.in_flight.inc(counted)
        self._num_calls += counted
        try:
            if counted and self._num_calls > self._max_calls:
                refusal = overloaded("too many calls at once; try again later", self._retry_after_s)
                await refusal.response(scope["path"])(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except ClientGone:
            _logger.debug("%s: the client disconnected", request_id)
        except Exception:
            _logger.exception("call %s failed", request_id)
            state["error"] = failure = internal_error("the server failed", request_id)
            if status is not None:  # the server closes the connection, and the client sees an incomplete answer
                raise AnswerCutOff(f"{request_id} failed") from None
            with suppress(ClientGone):
                await failure.response(scope["path"])(scope, receive, send_with_id)
        finally:
            self._num_calls -= counted
            if (holder := state.get("holder")) is not None:
                self._calls.give_back(holder, 1)
            self._metrics.in_flight.dec(counted)
            status = status or CLIENT_CLOSED_REQUEST
            self._metrics.requests.labels(_endpoint(scope), status).inc()
            if counted:
                duration_s = time.monotonic() - arrival_s
                ended = state.get("call"), state.get("error"), state.get("tenant", NOBODY).name
                outcome = Outcome(request_id, method, _endpoint(scope), status, duration_s, *ended)
                if self._tracing is not None and span is not None:
                    self._tracing.end(span, outcome)
                if self._audit is not None:
                    self._audit.write(outcome, time.time())
                if _access.isEnabledFor(logging.INFO):
                    _access.info("%s %s %d", outcome.method, outcome.route, status, extra={"fields": outcome.fields()})
            current_ids.reset(ids)


def _request_id(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _VALID_ID.fullmatch(given[0]):
        return str(given[0].decode())
    return f"req_{secrets.token_hex(12)}"


def _endpoint(scope: Scope) -> str:
    """The route's pattern: unknown paths must not create time series."""
    return getattr(scope.get("route"), "path", "unmatched")


def _warning(state: Mapping[str, Any]) -> str:
    kinds = {"unknown fields ignored": "unknown_fields", "fields without effect": "fields_without_effect"}
    return "; ".join(f"{what}: {_named(paths)}" for what, name in kinds.items() if (paths := state.get(name)))


def _named(paths: Sequence[str]) -> str:
    """Printable ASCII, so that a field's name cannot inject a header."""
    named = ", ".join(ascii(path)[1:-1] for path in paths[:_MAX_NAMED])
    return f"{named} and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else named


class Cors(CORSMiddleware):
    """Starlette's middleware for this API's methods and headers, with errors in OpenAI's shape. Sends no cookies."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", WARNING_HEADER, *BUDGET_HEADERS),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < HTTPStatus.BAD_REQUEST:
            return response
        # The CORS headers let the browser read the error; content-length belongs to the replaced body.
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        message = f"Origin: {bytes(response.body).decode()}; api.cors_origins names the web pages that may call"
        return ApiError(HTTPStatus.BAD_REQUEST, message, param="Origin", headers=headers).response()


class WithoutTrailers(HttpToolsProtocol):
    """Drops the trailers of chunked bodies, which uvicorn appends to the headers of the request.

    A trailer would pass for a header that the proxy deletes or that the API checks, as `authorization`. HAProxy 2.8 passes
    trailers on and cannot be told not to.
    """

    _in_headers = False

    def on_message_begin(self) -> None:
        self._in_headers = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()


def drop_trailers() -> None:
    """All uvicorn servers of this process that are made from now on, unless they name a protocol."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{WithoutTrailers.__name__}"
