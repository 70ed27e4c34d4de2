"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, or below MESSAGES in Anthropic's."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cluster.errors import InvalidField, LinkClosed, OutriderError, Overloaded, Unattainable

MESSAGES = "/v1/messages"  # Anthropic's API

_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


class ApiError(OutriderError):
    """An error answer. ``param``: path of the field at fault, such as ``messages.0.content``."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, object]:
        default = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
        # Clients that shorten conversations look for these words.
        lead = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, default), "message": f"{lead}{self}"}
        return {"type": "error", "error": error}

    def response(self, path: str = "") -> Response:
        """``path``: of the request."""
        body = self.anthropic_body() if is_anthropic(path) else self.body()
        return Response(json.dumps(body), self.status, self.headers, "application/json")


class ClientGone(OutriderError):
    """The client disconnected."""


def bad_request(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, f"{param}: {message}", param=param, code=code)


def overloaded(message: str, retry_after_s: float, code: str = "overloaded") -> ApiError:
    headers = _retry_after(retry_after_s)
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, type="rate_limit_error", code=code, headers=headers)


def unavailable(message: str, retry_after_s: float) -> ApiError:
    headers = _retry_after(retry_after_s)
    kind = "service_unavailable_error"
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, type=kind, code="no_target", headers=headers)


def internal_error(message: str, request_id: str) -> ApiError:
    message = f"{message}; see {request_id} in the server's log"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, type="server_error", code="internal_error")


def timed_out(timeout_s: float, advice: str = "ask for fewer tokens, or stream") -> ApiError:
    message = f"the answer was not complete within {timeout_s:g} seconds; {advice}"
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, type="timeout_error", code="timeout")


def as_api_error(error: Exception, retry_after_s: float) -> ApiError | None:
    """The error answer for an expected failure. None: the error is a defect of the server."""
    match error:
        case ApiError():
            return error
        case InvalidField():
            return bad_request(error.field, f"{error.reason}, got {shorten(error.value)}")
        case Unattainable():
            return overloaded(str(error), error.retry_after_s, "slo_unattainable")
        case Overloaded():
            return overloaded(str(error), error.retry_after_s)
        case LinkClosed():
            return unavailable(f"no target serves the model now: {error}", retry_after_s)
        case _:
            return None


def shorten(value: object, limit: int = 80) -> str:
    """The value's repr for a message, shortened."""
    if isinstance(value, str | bytes):
        value = value[:limit]
    elif isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}" if len(value) > 4 else shorten(repr(value)[:limit]).strip("'\"")
    elif isinstance(value, int) and value.bit_length() > 256:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` if a known name is close, else an empty string."""
    matches = difflib.get_close_matches(name[:64], list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def install_handlers(app: FastAPI, retry_after_s: float) -> None:
    """Answers errors of the routes and of FastAPI."""

    def answer(request: Request, error: Exception) -> Response:
        known = as_api_error(error, retry_after_s)
        assert known is not None, "installed for expected failures"
        return known.response(request.url.path)

    for kind in (ApiError, InvalidField, Overloaded, LinkClosed):
        app.add_exception_handler(kind, answer)

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
        message = f"{status.phrase}: {request.method} {shorten(request.url.path)}"
        return ApiError(status, message, code=code, headers=error.headers).response(request.url.path)

    app.add_exception_handler(HTTPException, http_error)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
