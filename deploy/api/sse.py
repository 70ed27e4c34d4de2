"""Server-sent events over ASGI."""

from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies of nginx's kind not to hold events back
]

DONE = b"data: [DONE]\n\n"


class EventStream:
    """An answer in pieces; its head goes out with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Returns when the connection has taken them; a caller that reads slowly holds this up, and nobody else."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """As ``write``, with the last events of the answer."""
        await self.write(events)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
