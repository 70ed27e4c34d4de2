"""The socket file of ``unix:///path``: its permissions, and the replacement of stale sockets."""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import InvalidField
from cluster.private_folder import make_private

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
