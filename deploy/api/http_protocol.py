"""The HTTP parser of uvicorn, without trailers."""

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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
