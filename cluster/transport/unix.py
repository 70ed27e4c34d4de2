"""Links within a node: ``unix:///path``. A frame is its length in four bytes, big-endian, then its bytes.

``send`` writes to the socket without waiting. The reactor's thread reads, and writes what the socket had no room for.
"""

import fcntl
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import InvalidField, LinkClosed, LinkFull
from cluster.messages import Hello
from cluster.private_folder import make_private
from cluster.transport import reactor
from cluster.transport.base import Limits, Mailbox
from cluster.transport.codec import Ping, encode
from cluster.transport.stream import StreamLink

SCHEME = "unix://"
_MAX_PATH_BYTES = 107  # sun_path holds 108 with the terminating zero


def path_of(address: str) -> Path:
    """Raises InvalidField if the address is not ``unix:///path``, or too long for the kernel."""
    path = address.removeprefix(SCHEME)
    if path == address or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidField("address", address, f"must be {SCHEME}/PATH, an absolute path of a socket")
    if (num_bytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:
        reason = f"the path has {num_bytes} bytes, at most {_MAX_PATH_BYTES} fit: choose a shorter folder"
        raise InvalidField("address", address, reason)
    return Path(path)


def bind(address: str, path: Path) -> tuple[socket.socket, int]:
    """A socket bound at ``path``, accessible to its owner only, and the file's inode. Replaces one that nobody listens at.

    Raises InvalidField if other users may enter the folder, the address is in use, or the file system refuses.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        make_private(path.parent)
        with _locked(path.parent):  # only one process may replace a stale socket
            _remove_stale(address, path)
            sock.bind(str(path))
            path.chmod(0o600)
            return sock, path.stat().st_ino
    except (OSError, InvalidField) as error:
        sock.close()
        if isinstance(error, InvalidField):
            raise
        raise InvalidField("address", address, f"cannot be bound: {error.strerror or error}") from error


def remove(path: Path, inode: int) -> None:
    """Removes the socket file unless another has replaced it."""
    try:
        with _locked(path.parent):
            if path.stat().st_ino == inode:
                path.unlink()
    except FileNotFoundError:
        pass  # removed already


def _remove_stale(address: str, path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidField("address", address, "the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # the listener's backlog is full
    raise InvalidField("address", address, "is already in use")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds an advisory lock on a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


_LENGTH = struct.Struct(">I")
_READ_BYTES = 64 * 2**10  # malloc would map and unmap larger buffers at every read
_BACKLOG = 128
_PING = encode(Ping())

_log = logging.getLogger(__name__)


class _Connection:
    """The ``Pipe`` of one link. Other methods than the Pipe's run on the reactor's thread."""

    def __init__(self, io: reactor.Reactor, sock: socket.socket, limits: Limits) -> None:
        self.link: StreamLink
        self._io = io
        self._sock = sock
        self._limits = limits
        self._incoming = bytearray()
        self._is_paused = False  # the mailbox is full
        self._heard_s = self._written_s = self._ticked_s = time.monotonic()
        self._lock = threading.Lock()  # guards the fields below, and the socket during a write
        self._unwritten: deque[memoryview] = deque()
        self._is_closed = False

    def start(self) -> None:
        self._watch()
        self._io.call_later(self._limits.heartbeat_s, self._tick)

    def write(self, frame: bytes) -> None:
        with self._lock:
            if self._is_closed:
                raise LinkClosed(f"{self.link} is closed")
            if len(self._unwritten) >= self._limits.queue_len:
                raise LinkFull(f"{self.link}: the other end reads too slowly, {len(self._unwritten)} messages wait for it")
            data = memoryview(_LENGTH.pack(len(frame)) + frame)
            if not self._unwritten:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    pass
                except OSError as error:  # the reactor sees it too, and tells the owner
                    raise LinkClosed(f"{self.link} broke: {error}") from error
            self._written_s = time.monotonic()
            if data:
                self._unwritten.append(data)
                if len(self._unwritten) == 1:
                    self._io.call(self._watch)

    def resume(self) -> None:
        self._io.call(self._resume)

    def finish(self) -> None:
        self.close()  # a handshake's frames always fit a new socket's buffer

    def close(self) -> None:
        self._io.call(self._close)

    def ready(self, events: int) -> None:
        if self._is_closed:
            return
        if events & reactor.WRITE:
            self._flush()
        if events & reactor.READ and not self._is_closed and not self._is_paused:
            self._read()

    def fail(self, reason: str) -> None:
        self.link.lost(reason)
        with self._lock:
            self._is_closed = True
            self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.link.lost(f"it broke: {error}")
            return
        if not data:
            self.link.lost("the other end closed it")
            return
        self._heard_s = time.monotonic()
        self._incoming += data
        self._take_frames()

    def _take_frames(self) -> None:
        start, end = 0, len(self._incoming)
        while end - start >= _LENGTH.size and not self._is_paused:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            if length > self.link.max_frame_bytes:
                self.link.lost(f"a frame of {length} bytes was announced, at most {self.link.max_frame_bytes} are allowed")
                return
            if end - start - _LENGTH.size < length:
                break
            start += _LENGTH.size
            frame = bytes(memoryview(self._incoming)[start : start + length])
            start += length
            self._is_paused = not self.link.on_frame(frame)
        del self._incoming[:start]
        if self._is_paused:
            self._watch()

    def _resume(self) -> None:
        if self._is_closed:
            return
        self._is_paused = False
        self._heard_s = time.monotonic()  # reading was paused
        self._take_frames()
        self._watch()

    def _flush(self) -> None:
        try:
            with self._lock:
                while self._unwritten:
                    rest = self._unwritten[0][self._sock.send(self._unwritten[0]) :]
                    if rest:
                        self._unwritten[0] = rest
                        break
                    self._unwritten.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self.link.lost(f"it broke: {error}")
            return
        self._watch()

    def _watch(self) -> None:
        if self._is_closed:
            return
        reading = 0 if self._is_paused else reactor.READ
        writing = reactor.WRITE if self._unwritten else 0
        self._io.watch(self._sock, reading | writing, self)

    def _tick(self) -> None:
        """Sends a heartbeat if the link is idle, and detects a silent peer."""
        if self._is_closed:
            return
        now_s = time.monotonic()
        late_s = max(0.0, now_s - self._ticked_s - self._limits.heartbeat_s)  # this process did not run, and heard nothing
        self._ticked_s, self._heard_s = now_s, min(now_s, self._heard_s + late_s)
        if not self._is_paused and now_s - self._heard_s > self._limits.silence_s:
            self.link.lost(f"nothing was heard for {now_s - self._heard_s:.1f} s")
            return
        if self.link.is_up and not self._unwritten and now_s - self._written_s >= self._limits.heartbeat_s:
            try:
                self.write(_PING)
            except LinkFull:
                pass  # the queued messages are a sign of life
            except LinkClosed as error:
                self.link.lost(str(error))
                return
        self._io.call_later(self._limits.heartbeat_s, self._tick)

    def _close(self) -> None:
        if self._is_closed:
            return
        self._io.watch(self._sock, 0, self)
        with self._lock:
            self._is_closed = True
            self._unwritten.clear()
            self._sock.close()
        self._incoming.clear()


class UnixListener:
    """As ``cluster.transport.listen``."""

    def __init__(self, address: str, mailbox: Mailbox, hello: Hello, limits: Limits) -> None:
        self.address = address
        self._mailbox = mailbox
        self._hello = hello
        self._limits = limits
        self._path = path_of(address)
        self._sock, self._inode = bind(address, self._path)
        self._sock.listen(_BACKLOG)
        self._sock.setblocking(False)
        self._links: dict[StreamLink, None] = {}
        self._is_closed = False
        self._io = reactor.running()
        self._io.call(lambda: self._io.watch(self._sock, reactor.READ, self))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            remove(self._path, self._inode)
            self._io.call(self._close)

    def ready(self, events: int) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # probably no file descriptor is left: retry later
                _log.error("no link can be accepted at %s: %s", self.address, error)
                self._io.watch(self._sock, 0, self)
                self._io.call_later(self._limits.heartbeat_s, self._accept_again)
                return
            if len(self._links) >= self._limits.max_links:
                _log.warning("a link at %s was dropped: there are %d already", self.address, len(self._links))
                sock.close()
            else:
                self._accept(sock)

    def fail(self, reason: str) -> None:
        _log.error("%s accepts no more links: %s", self.address, reason)
        self._is_closed = True
        self._sock.close()

    def _accept(self, sock: socket.socket) -> None:
        """Needs no further file descriptor, since the reactor is running."""
        sock.setblocking(False)
        link = _link(sock, self._hello, self._mailbox, self._limits, self.address, accepts=True)
        self._links[link] = None
        link.on_closed = lambda: self._links.pop(link, None)

        def expire() -> None:
            if not link.settled.is_set():
                link.lost(f"no Hello within {self._limits.handshake_s:g} s")

        self._io.call_later(self._limits.handshake_s, expire)

    def _accept_again(self) -> None:
        if not self._is_closed:
            self._io.watch(self._sock, reactor.READ, self)

    def _close(self) -> None:
        self._io.watch(self._sock, 0, self)
        self._sock.close()
        for link in list(self._links):
            link.close()


listen = UnixListener


def connect(address: str, mailbox: Mailbox, hello: Hello, deadline_s: float, limits: Limits) -> StreamLink:
    """As ``cluster.transport.connect``."""
    path = path_of(address)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no file descriptor is left
        raise LinkClosed(f"no link to {address}: {error}") from error
    sock.setblocking(False)
    try:
        sock.connect(str(path))
        link = _link(sock, hello, mailbox, limits, address, accepts=False)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        sock.close()
        raise LinkClosed(f"nobody listens at {address}") from error
    except (OSError, RuntimeError) as error:
        # BlockingIOError: the listener's backlog is full. Or no descriptor or thread is left for the reactor.
        sock.close()
        raise LinkClosed(f"no link to {address}: {error}") from error
    link.greet()
    link.wait_up(deadline_s)
    return link


def _link(sock: socket.socket, hello: Hello, mailbox: Mailbox, limits: Limits, address: str, accepts: bool) -> StreamLink:
    io = reactor.running()
    connection = _Connection(io, sock, limits)
    connection.link = StreamLink(connection, hello, mailbox, limits, address, accepts)
    io.call(connection.start)
    return connection.link
