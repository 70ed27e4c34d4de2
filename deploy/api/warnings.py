"""The header that names the fields of a request that were ignored because nobody here knows them."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-outrider-warning"

_MAX_NAMED = 8
_STATE_KEY = "ignored_fields"


def note_ignored(scope: Scope, paths: Sequence[str]) -> None:
    """Have the answer to this request name the fields at ``paths``."""
    if paths:
        scope.setdefault("state", {})[_STATE_KEY] = tuple(paths)


class IgnoredFields:
    """ASGI middleware that adds the header to whatever answers the request, an error included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_warning(message: Message) -> None:
            paths = scope.get("state", {}).get(_STATE_KEY, ())
            if message["type"] == "http.response.start" and paths:
                message["headers"] = [*message.get("headers", ()), (HEADER.encode(), _text(paths).encode("ascii"))]
            await send(message)

        await self._app(scope, receive, send_with_warning)


def _text(paths: Sequence[str]) -> str:
    """Printable ASCII, whatever the names hold: nothing of a request may begin a header of its own."""
    named = ", ".join(ascii(path)[1:-1] for path in paths[:_MAX_NAMED])
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return f"unknown fields ignored: {named}{more}"
