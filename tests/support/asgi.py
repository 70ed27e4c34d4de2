"""An ASGI caller that sends, stalls and disconnects as a test says."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI

from cluster.types import Request
from tests.support.api import app_of, model_info, saying, token_ids
from tests.support.scripted import ScriptedClient, Step, spell

CHAT = "/v1/chat/completions"


def answering(*steps: Step) -> Any:
    """A script of the given steps after two tokens of text."""

    def script(request: Request) -> Iterable[Step]:
        return [*spell(request, token_ids("the answer")[:2]), *steps]

    return script


class Caller:
    """Speaks ASGI, to send slowly and to disconnect."""

    def __init__(self, script: Any = None, app: FastAPI | None = None, **settings: Any) -> None:
        self.cluster = ScriptedClient(model_info(), script or saying("the answer"))
        self.app = app or app_of(self.cluster, **settings)
        self.reads = True
        self.stalls_at: bytes | None = None  # takes nothing from these bytes on
        self.sent: list[dict[str, Any]] = []
        self.got_body = asyncio.Event()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def put(self, **message: Any) -> None:
        self._incoming.put_nowait(message)

    def start(self, body: dict[str, Any] | None, path: str = CHAT) -> asyncio.Task[None]:
        """``body`` None: it is never sent."""
        if body is not None:
            self.put(type="http.request", body=json.dumps(body).encode(), more_body=False)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"api")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return asyncio.create_task(self.app(scope, self._incoming.get, self._take))

    async def _take(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_body.set()
        stalls = self.stalls_at is not None and self.stalls_at in message.get("body", b"")
        if message.get("body") and (stalls or not self.reads):
            await asyncio.Event().wait()  # as a server does whose connection takes no more

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()
