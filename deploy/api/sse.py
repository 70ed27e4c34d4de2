"""Server-sent events over ASGI."""

from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # disables buffering in nginx
]

DONE = b"data: [DONE]\n\n"


class EventStream:
    """A streamed response; the status line is sent with the first events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Returns when the connection has accepted the events: backpressure from a slow client."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Writes the last events and ends the response."""
        await self.write(events)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
