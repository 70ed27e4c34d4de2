"""The outermost layer: gives every call an id, counts it, and answers where everything else failed."""

import logging
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.errors import ClientGone, internal_error
from deploy.api.metrics import Metrics

_logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's number: nobody is there to read an answer


class Boundary:
    """ASGI middleware. The id is in ``scope["state"]["request_id"]`` and goes out as ``x-request-id``."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        counted = scope["path"].startswith("/v1/")  # probes and scrapes are no load
        self._metrics.in_flight.inc(counted)
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            _logger.debug("%s: the caller hung up", request_id)
        except Exception:
            _logger.exception("%s failed", request_id)
            if status is not None:
                raise  # the server then breaks the connection, and the caller sees that the answer is not whole
            await internal_error("the server failed", request_id).response()(scope, receive, send_with_id)
        finally:
            self._metrics.in_flight.dec(counted)
            self._metrics.requests.labels(_endpoint(scope), status or CLIENT_CLOSED_REQUEST).inc()


def _endpoint(scope: Scope) -> str:
    """The route's pattern, not the path: strangers must not be able to make new time series."""
    return getattr(scope.get("route"), "path", "unmatched")
