"""The dashboard's page and its files, served without a key: they hold no data."""

import hashlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

PAGE = "/dashboard"
SETTINGS = f"{PAGE}/settings.json"
_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The browser loads only files of this server, runs no inline script or style, and shows the page in no frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_paths() -> dict[str, Path]:
    """URL paths and their files."""
    files = {f"{PAGE}/{file.name}": file for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}
    index = files.pop(f"{PAGE}/index.html")
    return {PAGE: index, **files}


def add_page(app: FastAPI, *, asks_for_key: bool, can_switch: bool) -> None:
    """Adds a route per file. Files are read once."""
    for path, file in page_paths().items():
        route = app.get(
            path,
            include_in_schema=path == PAGE,
            name=f"dashboard {file.name}",
            response_model=None,
            response_class=HTMLResponse,  # of the page, the one that is documented
        )
        route(_route(file))

    @app.get(SETTINGS, include_in_schema=False)
    async def settings() -> JSONResponse:
        """What the page must know before it has a key."""
        return JSONResponse({"asks_for_key": asks_for_key, "can_switch": can_switch}, headers=_HEADERS)


def _route(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": etag}

    async def answer(request: Request) -> Response:
        """The dashboard, a page for browsers."""
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[file.suffix])

    return answer
