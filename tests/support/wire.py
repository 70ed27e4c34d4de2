"""Raw HTTP: bytes to a server, its responses, and malformed requests."""

import http.client
import json
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0
NUM_RESENT = 3  # times


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape. Raises AssertionError for any other answer."""
        assert self.header("content-type") == ["application/json"], self
        document = json.loads(self.body)
        assert set(document) == {"error"}, self
        error: dict[str, Any] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}, self
        assert error["message"], self
        assert len(self.header("x-request-id")) == 1, self
        return error


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = socket.create_connection((parts.hostname, parts.port or 80), timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket) -> Answer:
    """The next answer on a connection."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
        body = response.read()
    finally:
        response.close()
    return Answer(response.status, [(name.lower(), value) for name, value in response.getheaders()], body)


def exchange(url: str, *segments: bytes) -> Answer:
    """The response to bytes sent in these segments.

    On a busy machine 2 of 3,600 malformed requests got no response, probably because of a TCP reset: a server that
    refuses a request closes with unread bytes, and the reset may overtake the response. Such a request is sent again, at
    most NUM_RESENT times, since megabytes of unread bytes make it likelier."""
    for _ in range(NUM_RESENT):
        try:
            return _exchange(url, *segments)
        except ConnectionResetError:  # http.client's RemoteDisconnected is one
            continue
    return _exchange(url, *segments)


def _exchange(url: str, *segments: bytes) -> Answer:
    with connect(url) as connection:
        for segment in segments:
            try:
                connection.sendall(segment)
            except (BrokenPipeError, ConnectionResetError):
                break  # it was refused before its end
        return receive(connection)


def post(path: str, body: bytes, *headers: str, content_type: str = "application/json") -> tuple[bytes, bytes]:
    """Head and body of a request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode(), body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def chunked(path: str, body: bytes, headers: Sequence[str], trailers: Sequence[str]) -> bytes:
    """A request with a chunked body, and what follows it."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", *headers, "", ""]
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    return "\r\n".join(lines).encode() + chunks + "\r\n".join([*trailers, "", ""]).encode()


def hang_up(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def half_headers(url: str, num_connections: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent part of a request's headers."""
    connections: list[socket.socket] = []
    try:
        for _ in range(num_connections):
            connections.append(connect(url))
            connections[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: te")
        yield connections
    finally:
        for connection in connections:
            connection.close()


PATHS = ("/v1/completions", "/v1/chat/completions")


def malformed(num_requests: int, seed: int, model: str) -> list[tuple[str, bytes]]:
    """Requests of every kind with the kind's name; each must be refused with a 4xx."""
    kinds = [
        _broken_start,
        _broken_headers,
        _broken_length,
        _broken_chunks,
        _smuggled,
        _too_large,
        _other_protocol,
        _wrong_method,
        _unknown_path,
        _broken_json,
        _wrong_fields,
    ]
    rng = random.Random(seed)
    return [(kind.__name__.strip("_"), kind(rng, model)) for i in range(num_requests) for kind in [kinds[i % len(kinds)]]]


def _broken_start(rng: random.Random, model: str) -> bytes:
    start = rng.choice(
        [
            rng.randbytes(40).replace(b"\n", b"x").lstrip(b"\r") + b"!",
            b"GET /health",  # HTTP/0.9
            b"GET /health HTTP/1.1 x",
            b"GET /he alth HTTP/1.1",
            b"G(T /health HTTP/1.1",
            b"GET /health HTTP/1,1",
            b"GET /health HTTP/%d.%d" % (rng.randint(2, 9), rng.randint(0, 9)),
            b"GET /health\x00 HTTP/1.1",
            b"/health HTTP/1.1",
            b" GET /health HTTP/1.1",
        ]
    )
    return start + b"\r\nHost: test\r\n\r\n"


def _broken_headers(rng: random.Random, model: str) -> bytes:
    header = rng.choice(
        [
            b"Host: test\r\nNo colon here",
            b"Host: test\r\nA name: value",
            b"Host: test\r\n: value",
            b"Host: test\r\nX-A\x00B: value",
            b"Host: test\r\nX-A: va\x00lue",
            b"Host: test\r\nX-\xff\xfe: value",
            b"Host: one\r\nHost: two",
            b"X-No-Host: 1",
            b"Host: test\r\n" + b"\r\n".join(b"X-%d: 1" % i for i in range(rng.randint(200, 400))),
        ]
    )
    return b"GET /health HTTP/1.1\r\n" + header + b"\r\n\r\n"


def _broken_length(rng: random.Random, model: str) -> bytes:
    length = rng.choice([b"-1", b"+2", b"abc", b"1e3", b"0x10", b"", b"2\r\nContent-Length: 3", b"2, 3", b"9" * 30])
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: " + length
    ) + b"\r\n\r\n{}"


def _broken_chunks(rng: random.Random, model: str) -> bytes:
    chunks = rng.choice(
        [b"zz\r\n{}\r\n0\r\n\r\n", b"-2\r\n{}\r\n0\r\n\r\n", b"2\r\n{}xx0\r\n\r\n", b"F" * 20 + b"\r\n{}", b"\r\n{}"]
    )
    return _chunked(b"chunked") + chunks


def _smuggled(rng: random.Random, model: str) -> bytes:
    inner = b"GET /v1/outrider/status HTTP/1.1\r\nHost: test\r\n\r\n"
    return rng.choice(
        [
            _chunked(b"chunked", b"Content-Length: %d" % (5 + len(inner))) + b"0\r\n\r\n" + inner,
            _chunked(b"xchunked", b"Content-Length: 4") + b"0\r\n\r\n",
            _chunked(b"identity, chunked", b"Content-Length: 4") + b"0\r\n\r\n",
            _chunked(b"chunked, chunked") + b"0\r\n\r\n",
            _chunked(b"\x0bchunked") + b"0\r\n\r\n",
            _chunked(b"chunked\r\nTransfer-Encoding: identity") + b"0\r\n\r\n",
        ]
    )


def _too_large(rng: random.Random, model: str) -> bytes:
    size = rng.randint(20_000, 60_000)
    return rng.choice(
        [
            b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: test\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: test\r\nX-Large: " + b"a" * size + b"\r\n\r\n",
            b"".join(post("/v1/completions", b" " * 4_300_000)),
        ]
    )


def _other_protocol(rng: random.Random, model: str) -> bytes:
    return rng.choice(
        [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(64),
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nHost: test\r\n\r\n",
        ]
    )


def _wrong_method(rng: random.Random, model: str) -> bytes:
    method, path = rng.choice(["PUT", "DELETE", "PATCH", "GET", "TRACE", "BREW"]), rng.choice(PATHS)
    return f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n".encode()


def _unknown_path(rng: random.Random, model: str) -> bytes:
    path = rng.choice(
        [
            "/-/routes",
            "/-/healthz",
            "/%2d/routes",
            "/-/ROUTES",
            "/health/",
            "/metrics/",
            "/v1/models/",
            "/v1",
            "/..%2f",
            "/%00",
        ]
    )
    return get(f"{path}{'?' + 'x' * rng.randint(1, 99) if rng.random() < 0.5 else ''}")


def _broken_json(rng: random.Random, model: str) -> bytes:
    whole = json.dumps({"model": model, "prompt": "Hello", "messages": [{"role": "user", "content": "é"}]}).encode()
    body = rng.choice(
        [
            whole[: rng.randint(0, len(whole) - 1)],
            whole + b"}",
            whole.replace(b"Hello", rng.choice([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80"])),
            whole.replace(b'"Hello"', rng.choice([b"NaN", b"Infinity", b"'a'", b"01", b"[" * 20_000])),
            rng.choice([b"null", b"[]", b"3", b'"text"', b"\xef\xbb\xbf{}"]),
        ]
    )
    return b"".join(post(rng.choice(PATHS), body))


def _wrong_fields(rng: random.Random, model: str) -> bytes:
    path = rng.choice(PATHS)
    fields: dict[str, Any] = {"model": model, "prompt": "Hello", "max_tokens": 1}
    if path.endswith("chat/completions"):
        fields = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    content_type = "application/json"
    if rng.random() < 0.1:
        content_type = rng.choice(["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
    else:
        name = rng.choice(
            ["model", "prompt", "messages", "max_tokens", "temperature", "n", "stop", "seed", "stream", "logit_bias"]
        )
        wrong: list[Any] = [{"a": [[]]}, [[{}]], -(10**30), [True, 1.5]]
        fields = {**fields, name: rng.choice(wrong)}
        if name in ("prompt", "messages"):
            fields = {**fields, "model": 7}  # of the other endpoint, where an unknown field may be ignored
    return b"".join(post(path, json.dumps(fields).encode(), content_type=content_type))


def _chunked(encoding: bytes, *headers: bytes) -> bytes:
    lines = [
        b"POST /v1/completions HTTP/1.1",
        b"Host: test",
        b"Content-Type: application/json",
        *headers,
        b"Transfer-Encoding: " + encoding,
    ]
    return b"\r\n".join([*lines, b"", b""])
