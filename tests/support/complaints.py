"""What is wrong with the API's answer to a malformed request."""

from typing import Any

import httpx

from tests.support.api import CHAT, COMPLETIONS, chat_body, completion_body

BODIES = {CHAT: chat_body, COMPLETIONS: completion_body}


async def complaint(http: httpx.AsyncClient, path: str, body: bytes, param: str) -> str | None:
    """What is wrong with the answer to a malformed request; None where nothing is."""
    response = await http.post(path, content=body, headers={"content-type": "application/json"})
    error = response.json().get("error", {})
    right = (
        400 <= response.status_code < 500
        and set(error) == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
        and error["param"] == param
        and error["message"].startswith(f"{param}: ")
        and len(error["message"]) < 500
    )
    return None if right else f"{body[:200]!r}, wrong in {param}: {response.status_code} {response.text[:300]}"


async def refused(http: httpx.AsyncClient, path: str, body: bytes, param: str) -> dict[str, Any]:
    assert await complaint(http, path, body, param) is None
    response = await http.post(path, content=body, headers={"content-type": "application/json"})
    return dict(response.json()["error"])
