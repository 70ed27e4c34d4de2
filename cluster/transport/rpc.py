"""Links between nodes: ``grpc://host:port``. One method, a bidirectional stream of frames.

Each link has a reading and a writing thread: gRPC's asyncio interface is no faster for one message per round, and
conflicts with its other users in the process, such as Ray Serve. gRPC's flow control stops a writer whose reader stops.

A frame travels in pieces of at most ``PIECE_BYTES``, whose first byte says whether it is the last. gRPC buffers a whole
message before any check; small pieces bound what an unauthenticated peer can occupy.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any
from urllib.parse import urlsplit

import grpc

from cluster.config import TlsConfig
from cluster.errors import InvalidField, LinkClosed, LinkFull, OutriderError, WireError
from cluster.messages import Hello
from cluster.transport.base import Limits, Mailbox
from cluster.transport.stream import MAX_HANDSHAKE_BYTES, StreamLink
from cluster.transport.tls import NODE_NAME, channel_credentials, server_credentials

SCHEME = "grpc://"
PIECE_BYTES = 64 * 2**10
_MORE, _LAST = b"\0", b"\1"
_STOP_S = 5.0
_SERVICE, _METHOD = "outrider.Link", "Frames"

_log = logging.getLogger(__name__)


def _options(limits: Limits) -> list[tuple[str, int]]:
    """gRPC's core detects peers whose host hangs or is gone, by HTTP/2 pings that they do not answer."""
    heartbeat_ms = int(limits.heartbeat_s * 1000)
    ping_timeout_ms = max(1, int(limits.silence_s * 1000) - heartbeat_ms)
    return [
        ("grpc.max_send_message_length", PIECE_BYTES + 1),
        ("grpc.max_receive_message_length", PIECE_BYTES + 1),
        ("grpc.max_metadata_size", MAX_HANDSHAKE_BYTES),
        ("grpc.keepalive_time_ms", heartbeat_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),  # keepalive_timeout_ms alone does not end a stopped process's link
        ("grpc.http2.max_pings_without_data", 0),  # unlimited pings on an idle link
        ("grpc.http2.max_ping_strikes", 0),  # accept the peer's pings
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a connection per link, without back-off after failed ones
        ("grpc.so_reuseport", 0),  # a port that is taken is an error
        ("grpc.max_connection_idle_ms", int(limits.handshake_s * 1000)),  # a connection without a stream
        ("grpc.server_handshake_timeout_ms", int(limits.handshake_s * 1000)),  # of TLS and HTTP/2
    ]


class _Pipe:
    """The ``Pipe`` of one link: a bounded queue that gRPC's writing thread reads."""

    def __init__(self, limits: Limits) -> None:
        self.link: StreamLink
        self.stop: Callable[[], None]  # aborts the stream
        self._limits = limits
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._is_finished = False  # accepts no more frames
        self._may_read = threading.Event()

    def write(self, frame: bytes) -> None:
        with self._changed:
            if self._is_finished:
                raise LinkClosed(f"{self.link} is closed")
            if len(self._queue) >= self._limits.queue_len:
                raise LinkFull(f"{self.link}: the other end reads too slowly, {len(self._queue)} messages wait for it")
            self._queue.append(frame)
            self._changed.notify()

    def resume(self) -> None:
        self._may_read.set()

    def finish(self) -> None:
        with self._changed:
            self._is_finished = True
            self._changed.notify()
        self._may_read.set()

    def close(self) -> None:
        with self._changed:
            self._queue.clear()
        self.finish()
        self.stop()

    def written(self) -> Iterator[bytes]:
        """The queued frames until the end of the stream. Also ends a handshake that takes too long."""
        handshake_by_s = time.monotonic() + self._limits.handshake_s
        while True:
            with self._changed:
                while not self._queue and not self._is_finished:
                    left_s = None if self.link.settled.is_set() else handshake_by_s - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        break
                    self._changed.wait(left_s)
                frame = self._queue.popleft() if self._queue else None
                if frame is None and self._is_finished:
                    return
            if frame is not None:
                yield from _pieces(frame)
            else:
                self.link.lost(f"no Hello within {self._limits.handshake_s:g} s")

    def read(self, incoming: Iterator[bytes]) -> None:
        """Passes received frames to the link until the end of the stream."""
        reason = "its reading thread failed"
        try:
            for frame in _frames(incoming, lambda: self.link.max_frame_bytes):
                if not self.link.on_frame(frame):
                    self._may_read.wait()  # until resume or the end of the stream
                    self._may_read.clear()
            reason = "the other end closed it"
        except WireError as error:
            reason = str(error)
        except grpc.RpcError as error:
            reason = _reason(error)
        finally:
            self.link.lost(reason)

    def start_reading(self, incoming: Iterator[bytes]) -> None:
        threading.Thread(target=self.read, args=(incoming,), name="outrider-link", daemon=True).start()


def _pieces(frame: bytes) -> Iterator[bytes]:
    last = max(0, len(frame) - 1) // PIECE_BYTES * PIECE_BYTES  # start of the last piece
    for start in range(0, last, PIECE_BYTES):
        yield _MORE + frame[start : start + PIECE_BYTES]
    yield _LAST + frame[last:]


def _frames(pieces: Iterable[bytes], max_frame_bytes: Callable[[], int]) -> Iterator[bytes]:
    """Raises WireError if pieces are malformed or exceed the current limit."""
    parts: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        kind = piece[:1]
        if kind not in (_MORE, _LAST) or (kind == _MORE and len(piece) == 1):
            raise WireError(f"{len(piece)} bytes came that are no piece of a frame")
        num_bytes += len(piece) - 1
        if num_bytes > max_frame_bytes():
            raise WireError(f"a frame of at least {num_bytes} bytes came, at most {max_frame_bytes()} are allowed")
        parts.append(piece[1:])
        if kind == _LAST:
            frame = parts[0] if len(parts) == 1 else b"".join(parts)
            parts, num_bytes = [], 0
            yield frame


def _reason(error: grpc.RpcError) -> str:
    """Why a stream ended, as far as gRPC tells a client."""
    if not isinstance(error, grpc.Call):
        return "the connection broke, or the other end closed it"
    if error.code() is grpc.StatusCode.CANCELLED:
        return "the other end closed it"
    return f"{error.details()} ({error.code().name})"


class RpcListener:
    """As ``cluster.transport.listen``."""

    def __init__(self, address: str, mailbox: Mailbox, hello: Hello, limits: Limits, tls: TlsConfig | None) -> None:
        host, port = _host_and_port(address)
        self._mailbox = mailbox
        self._hello = hello
        self._limits = limits
        self._has_tls = tls is not None
        self._lock = threading.Lock()
        self._links: dict[StreamLink, None] = {}
        self._is_closed = False
        self._server = grpc.server(
            _ThreadPerStream(), options=_options(limits), maximum_concurrent_rpcs=limits.max_links, compression=None
        )
        serve = grpc.stream_stream_rpc_method_handler(self._serve)  # no serializers: bytes
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: serve}),))
        try:
            at = f"{host}:{port}"
            port = (
                self._server.add_insecure_port(at)
                if tls is None
                else self._server.add_secure_port(at, server_credentials(tls))
            )
        except RuntimeError as error:
            raise InvalidField("address", address, "cannot be bound: the port is taken, or the host is another") from error
        self.address = f"{SCHEME}{host}:{port}"
        self._server.start()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            links = list(self._links)
        for link in links:
            link.close()
        if not self._server.stop(None).wait(_STOP_S):
            _log.warning("the gRPC server at %s has not stopped within %g s", self.address, _STOP_S)

    def _serve(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serves one stream, on a thread of its own that writes what this yields."""
        if self._has_tls and NODE_NAME.encode() not in context.auth_context().get("x509_subject_alternative_name", ()):
            reason = f"the certificate does not name {NODE_NAME}"  # which gRPC checks of listeners only
            _log.warning("refused a link from %s at %s: %s", context.peer(), self.address, reason)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        pipe = _Pipe(self._limits)
        pipe.stop = context.cancel
        link = pipe.link = StreamLink(pipe, self._hello, self._mailbox, self._limits, self.address, accepts=True)
        with self._lock:
            if self._is_closed:
                return
            self._links[link] = None
        link.on_closed = lambda: self._links.pop(link, None)
        if not context.add_callback(pipe.finish):
            link.lost("the connection broke")
            return
        try:
            pipe.start_reading(incoming)
        except RuntimeError as error:
            link.lost(f"its reading thread did not start: {error}")
            return
        yield from pipe.written()


class _ThreadPerStream(Executor):
    """A daemon thread for each stream, so that a process that leaves a link open can exit; ``max_links`` bounds them."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)  # read by gRPC's server
                raise

        try:
            threading.Thread(target=run, name="outrider-link-writer", daemon=True).start()
        except RuntimeError as error:  # would end gRPC's serving thread
            _log.warning("a link is refused, its thread did not start: %s", error)
            future.set_exception(error)
        return future


def connect(
    address: str, mailbox: Mailbox, hello: Hello, deadline_s: float, limits: Limits, tls: TlsConfig | None
) -> StreamLink:
    """As ``cluster.transport.connect``."""
    host, port = _host_and_port(address)
    try:
        channel = _channel(f"{host}:{port}", limits, tls)
    except (OSError, RuntimeError) as error:  # probably no descriptor or thread is left
        raise LinkClosed(f"no link to {address}: {error}") from error
    pipe = _Pipe(limits)
    pipe.stop = channel.close  # also cancels the call
    link = pipe.link = StreamLink(pipe, hello, mailbox, limits, address, accepts=False)
    try:
        link.greet()
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(pipe.written())
        call.add_callback(pipe.finish)
        pipe.start_reading(call)
        link.wait_up(deadline_s)
    except OutriderError:
        pipe.close()
        raise
    except (OSError, RuntimeError) as error:
        pipe.close()
        raise LinkClosed(f"no link to {address}: {error}") from error
    return link


def _channel(peer: str, limits: Limits, tls: TlsConfig | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(peer, options=_options(limits))
    options = [*_options(limits), ("grpc.ssl_target_name_override", NODE_NAME)]
    return grpc.secure_channel(peer, channel_credentials(tls), options=options)


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.netloc.rpartition(":")[0], parts.port
        if parts.scheme == "grpc" and host and port is not None and not (parts.path or parts.query or parts.fragment):
            return host, port
    except ValueError:
        pass  # refused below
    raise InvalidField("address", address, f"must be {SCHEME}HOST:PORT")
