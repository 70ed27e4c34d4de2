"""Tensor links between two processes of one machine: rows pass through memory that both map, headers over a Unix socket.

The memory has no name, so nothing is left of it when both have ended, however they end. Its size is sealed. It has two
slots: while one is read, the other is written, and a sender waits for the slot before the last to be read.
"""

import fcntl
import logging
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from cluster.transport.tensors import MAX_HEADER_BYTES, Frame, Header, header_of, read_header

logger = logging.getLogger(__name__)

SLOT_BYTES, NUM_SLOTS = 4 * 2**20, 2
IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if IS_AVAILABLE else 0
_TURN = b"\x01"  # a slot is written, or read
_LENGTH = struct.Struct("<I")
_PAUSED = 1.5  # times the silence: a wait that ended later was one in which this process was stopped


class Offer:
    """The sending end until the other one has come. ``name``: of its socket, which exists as long as this process.

    Raises OSError: this process may make no such memory.
    """

    def __init__(self, wait_s: float) -> None:
        self.name = f"outrider-{secrets.token_hex(16)}"
        self._wait_s = wait_s
        with ExitStack() as undone:
            self._file = os.memfd_create("outrider-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undone.callback(os.close, self._file)
            os.ftruncate(self._file, NUM_SLOTS * SLOT_BYTES)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self._listening = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listening.bind(f"\0{self.name}")
            self._listening.listen()
            self._kept = undone.pop_all()

    def close(self) -> None:
        self._kept.close()

    def accept(self, silence_s: float) -> "SharedWire":
        """The first connection of a process of this user; any process of the machine can see the name. Raises OSError: there
        was none in time."""
        end_s = time.monotonic() + self._wait_s
        with closing(self), ExitStack() as undone:
            while True:
                self._listening.settimeout(max(0.0, end_s - time.monotonic()))
                connected = undone.enter_context(self._listening.accept()[0])
                if _is_own(connected):
                    break
                connected.close()
            socket.send_fds(connected, [_TURN], [self._file])
            wire = SharedWire(connected, self._file, silence_s)
            undone.pop_all()
        return wire


def offer(wait_s: float) -> Offer | None:
    """None: this machine has no such memory, or allows none."""
    try:
        return Offer(wait_s) if IS_AVAILABLE else None
    except OSError as error:
        logger.warning("hidden states go over a network of this machine instead of shared memory: %s", error)
        return None


def reach(name: str, wait_s: float) -> socket.socket | None:
    """A connection to the ``Offer`` of that name, if a process of this user on this machine has made it."""
    reached = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    reached.settimeout(wait_s)
    with suppress(OSError):
        reached.connect(f"\0{name}")
        if _is_own(reached):
            return reached
    reached.close()
    return None


def joined(reached: socket.socket, silence_s: float) -> "SharedWire":
    """The receiving end. Raises OSError: the other one is gone, or gave other memory."""
    with ExitStack() as undone:
        undone.callback(reached.close)
        _, files, _, _ = socket.recv_fds(reached, 1, 1)
        with _closed(*files):
            if len(files) != 1 or os.fstat(files[0]).st_size != NUM_SLOTS * SLOT_BYTES:
                raise ConnectionError("the other end gave no memory of the agreed size")
            if fcntl.fcntl(files[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ConnectionError("the size of the memory that the other end gave is not sealed")
            wire = SharedWire(reached, files[0], silence_s)
        undone.pop_all()
    return wire


@contextmanager
def _closed(*files: int) -> Iterator[None]:
    """Behind this."""
    try:
        yield
    finally:
        for file in files:
            os.close(file)


class SharedWire:
    """``groups.Wire`` of rows in host memory. ``file``: of the memory; it may be closed behind this."""

    def __init__(self, connected: socket.socket, file: int, silence_s: float) -> None:
        self._socket = connected
        self._socket.settimeout(silence_s)
        self._silence_s = silence_s
        memory = np.frombuffer(mmap.mmap(file, NUM_SLOTS * SLOT_BYTES), np.uint8)
        self._slots = memory.reshape(NUM_SLOTS, SLOT_BYTES)
        self._next = self._num_unread = 0  # slots

    def queued(self, frame: Frame) -> None:
        pass

    def send(self, frame: Frame) -> None:
        header = header_of(frame)
        self._socket.sendall(_LENGTH.pack(len(header)) + header)
        if frame.rows is None:
            return
        data = _bytes_of(frame.rows.contiguous())
        for start in range(0, len(data), SLOT_BYTES):
            if self._num_unread == NUM_SLOTS:
                self._take_turn()
                self._num_unread -= 1
            part = data[start : start + SLOT_BYTES]
            self._slots[self._next, : len(part)] = part
            self._next = (self._next + 1) % NUM_SLOTS
            self._num_unread += 1
            self._socket.sendall(_TURN)

    def receive(self) -> Frame:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        told = read_header(self._exactly(length))
        return Frame(told.parts, told.ended, self._rows(told) if told.dtype else None)

    def leave(self) -> None:
        """The other end is told at once."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._slots = np.zeros((0, 0), np.uint8)

    def _rows(self, told: Header) -> Tensor:
        rows = torch.empty(told.shape, dtype=getattr(torch, told.dtype))
        data = _bytes_of(rows)
        for start in range(0, len(data), SLOT_BYTES):
            self._take_turn()
            part = data[start : start + SLOT_BYTES]
            part[:] = self._slots[self._next, : len(part)]
            self._next = (self._next + 1) % NUM_SLOTS
            self._socket.sendall(_TURN)
        return rows

    def _take_turn(self) -> None:
        if self._exactly(1) != _TURN:
            raise ConnectionError("the other end is out of turn")

    def _exactly(self, num_bytes: int) -> bytes:
        found = bytearray(num_bytes)
        rest = memoryview(found)
        while rest:
            began_s = time.monotonic()
            try:
                num = self._socket.recv_into(rest)
            except TimeoutError:
                if time.monotonic() - began_s < _PAUSED * self._silence_s:
                    raise
                continue  # this process did not run, and heard nothing
            if not num:
                raise ConnectionError("the other end has closed it")
            rest = rest[num:]
        return bytes(found)


def _bytes_of(rows: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Contiguous rows in host memory, not copied."""
    return rows.detach().view(-1).view(torch.uint8).numpy()


def _is_own(connected: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
