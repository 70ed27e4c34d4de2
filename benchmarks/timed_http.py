"""An HTTP client that records arrival times of bytes and parses them afterwards.

On a machine shared by server and load, parsing streams during the measurement would slow the server down.
"""

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

READ_BYTES = 65536


class BrokenResponse(Exception):
    """The connection ended before the response did, or the bytes are no HTTP."""


@dataclass(frozen=True, slots=True)
class TimedResponse:
    """``chunks``: of the body, each with the monotonic arrival time of its last byte. ``whole``: not truncated.
    ``headers``: names in lower case."""

    status: int
    chunks: tuple[tuple[float, bytes], ...]
    whole: bool
    headers: Mapping[str, str]

    @property
    def body(self) -> bytes:
        return b"".join(chunk for _, chunk in self.chunks)


async def post_json(
    host: str,
    port: int,
    path: str,
    body: Any,
    on_piece: Callable[[int], None] = lambda number: None,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    tls: bool = False,
) -> TimedResponse:
    """Uses its own connection. ``on_piece`` gets the number of pieces so far. ``tls`` checks the server's certificate.

    Raises:
        OSError: nobody listens, or the connection was reset before a response.
        BrokenResponse: the response is invalid.
    """
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        + "\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port, ssl=tls or None)
    pieces: list[tuple[float, bytes]] = []
    try:
        writer.write(head.encode() + payload)
        while piece := await reader.read(READ_BYTES):
            pieces.append((time.monotonic(), piece))
            on_piece(len(pieces))
    except ConnectionResetError:
        if not pieces:
            raise
    finally:
        writer.close()
    return _parse(pieces)


def _parse(pieces: list[tuple[float, bytes]]) -> TimedResponse:
    data = b"".join(piece for _, piece in pieces)
    ends = list(accumulate(len(piece) for _, piece in pieces))
    head, found, _ = data.partition(b"\r\n\r\n")
    try:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        status = int(status_line.split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    except (IndexError, ValueError) as error:
        raise BrokenResponse(f"no HTTP response, but {data[:80]!r}") from error
    if not found:
        raise BrokenResponse(f"the response broke off in its head: {data[-80:]!r}")

    def came_s(end: int) -> float:
        return pieces[bisect_left(ends, end)][0]

    start = len(head) + 4
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = int(headers.get("content-length", len(data) - start))
        body = data[start : start + length]
        return TimedResponse(status, ((came_s(len(data)), body),), len(body) == length, headers)
    chunks: list[tuple[float, bytes]] = []
    while (line_end := data.find(b"\r\n", start)) >= 0:
        length = int(data[start:line_end].split(b";")[0], 16)
        first, start = line_end + 2, line_end + 2 + length + 2
        if length == 0:
            return TimedResponse(status, tuple(chunks), True, headers)
        if start > len(data):
            break
        chunks.append((came_s(start), data[first : first + length]))
    return TimedResponse(status, tuple(chunks), False, headers)
