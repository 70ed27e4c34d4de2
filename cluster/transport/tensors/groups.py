"""Tensor links of pairs of processes: over memory that both share (``shared.py``) where both are on one machine and rows in
host memory; else over torch.distributed: gloo for headers, and for rows unless both ends are on a GPU of their own, between
which NCCL takes them, on a stream of its own.

The target's process listens (``Meeting``); a drafter calls (``call``) once its control link is up, and is called back by
number (``answer``), so that an end that was lost is never met again. As between ranks, ends do not authenticate each other:
between machines the network must be private.
"""

import atexit
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cluster.errors import LinkClosed
from cluster.transport.tensors import (
    MAX_HEADER_BYTES,
    MAX_QUEUED_BYTES,
    Frame,
    FrameQueue,
    TensorEnd,
    header_of,
    read_header,
    shared,
)

MEET_S = 10.0
HEARTBEAT_S, SILENCE_S = 1.0, 6.0  # as of control links
_SENDER, _RECEIVER = 0, 1
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()
_inside: dict[threading.Thread, Callable[[], None]] = {}  # threads that compute in torch.distributed, and what ends them


@contextmanager
def _in_torch(end: Callable[[], None] = lambda: None, leave: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Exit waits for the thread, and for ``leave`` at its end: to come back from torch during it would abort the process."""
    thread = threading.current_thread()
    _inside[thread] = end
    try:
        yield
    finally:
        leave()
        del _inside[thread]


@atexit.register
def _leave_torch() -> None:
    for end in tuple(_inside.values()):
        end()
    for thread in tuple(_inside):
        thread.join(MEET_S)


class Meeting:
    """Where drafters meet a target. ``host``: that it listens at; only 127.0.0.1 is closed to other machines.
    ``shares_memory``: with processes of this machine, for rows in host memory."""

    def __init__(self, host: str, *, shares_memory: bool = True) -> None:
        self._shares_memory = shares_memory
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        self.host, self.address = host, f"{host}:{port}"
        self._store = TCPStore(
            host, port, is_master=True, timeout=_MEET, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    @_in_torch()
    def answer(self, name: str, device: torch.device, end: TensorEnd | None = None) -> "TensorSender":
        """The link to the newest caller ``name``, if it still waits for an answer. Waits MEET_S. Raises LinkClosed."""
        try:
            store = _client(self.address)
            store.wait([f"{name}/waits"], _MEET)
            store.delete_key(f"{name}/waits")  # first, so that the number is of no earlier call
            number = store.add(f"{name}/calls", 0)
            wire = _sending(PrefixStore(f"{name}/{number}", store), self.host, device, self._shares_memory)
            return TensorSender(wire, end)
        except (RuntimeError, OSError) as error:
            raise LinkClosed(f"{name} did not call for hidden states: {error}") from error


_MEET = timedelta(seconds=MEET_S)


@_in_torch()
def call(address: str, name: str, device: torch.device, end: TensorEnd) -> "TensorReceiver":
    """The receiving end of a link to the ``Meeting`` at ``address``. Waits MEET_S at most. Raises LinkClosed."""
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), MEET_S) as reached:
            own_host = reached.getsockname()[0]  # at which the target reaches this machine
        store = _client(address)
        number = store.add(f"{name}/calls", 1)
        store.set(f"{name}/waits", "")
        try:
            return TensorReceiver(_receiving(PrefixStore(f"{name}/{number}", store), own_host, device), end)
        except (RuntimeError, OSError):
            if store.add(f"{name}/calls", 0) == number:  # an answer that comes before the next call is not to this one
                store.delete_key(f"{name}/waits")
            raise
    except (RuntimeError, OSError, ValueError) as error:  # the last: the target has no address
        raise LinkClosed(f"no hidden states from {address}: {error}") from error


class Wire(Protocol):
    """One end of a pair, used on one thread. A transfer raises RuntimeError or OSError: the peer is gone, or silent."""

    def queued(self, frame: Frame) -> None:
        """On the thread that queues it, before."""

    def send(self, frame: Frame) -> None: ...

    def receive(self) -> Frame:
        """Raises ValueError: the peer sent no frame."""

    def leave(self) -> None:
        """Ends the connection, so that the other end is told at once."""


class GroupWire:
    """``Wire`` over process groups."""

    def __init__(self, store: Store, rank: int, host: str, device: torch.device) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = _MEET, [gloo.create_device(hostname=host)]
        self._other, self._device = 1 - rank, device
        self._host_group: Any = gloo(PrefixStore("host", store), rank, 2, options)
        self._group, self._stream = self._host_group, cast(Any, None)
        self._ready: Any = None  # of the newest rows, on a GPU
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)
        own = _gpu_of(device)
        store.set(f"gpu/{rank}", own)
        self._between = torch.device("cpu")  # memory from and to which rows travel
        if own and (other := store.get(f"gpu/{1 - rank}").decode()) and other != own:  # NCCL refuses a GPU twice
            self._group, self._between = _nccl_pair(PrefixStore("device", store), rank), device

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def queued(self, frame: Frame) -> None:
        if self._stream is not None and frame.rows is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def send(self, frame: Frame) -> None:
        header = torch.frombuffer(bytearray(header_of(frame)), dtype=torch.uint8)
        for part in (torch.tensor([len(header)]), header):
            self._host_group.send([part], self._other, 0).wait(timedelta(seconds=SILENCE_S))
        if frame.rows is not None:
            with self._on_stream():
                if self._stream is not None:
                    self._stream.wait_event(self._ready)
                self._wait(self._group.send([frame.rows.to(self._between).contiguous()], self._other, 0))

    def receive(self) -> Frame:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(self._host_group.recv([length], self._other, 0))
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {int(length)} bytes")
        header = torch.empty(int(length), dtype=torch.uint8)
        self._wait(self._host_group.recv([header], self._other, 0))
        told = read_header(header.numpy().tobytes())
        rows: Tensor | None = None
        if told.dtype:
            with self._on_stream():
                rows = torch.empty(told.shape, dtype=getattr(torch, told.dtype), device=self._between)
                self._wait(self._group.recv([rows], self._other, 0))
                rows = rows.to(self._device)
            if self._stream is not None:  # read from here on the stream of this thread, which may outlast the frame
                rows.record_stream(torch.cuda.current_stream(self._device))
        return Frame(told.parts, told.ended, rows)

    def leave(self) -> None:
        if self._between.type == "cuda":
            self._group.abort()  # what is under way with a peer that is lost never ends
        self._host_group = self._group = None

    def _wait(self, work: Any) -> None:
        """For a transfer, on this thread alone. Raises RuntimeError: the peer is gone, or silent."""
        work.wait(timedelta(seconds=SILENCE_S))
        if self._stream is not None:
            self._stream.synchronize()


class TensorSender:
    """``TensorLink``. ``end``: is told when the link breaks."""

    def __init__(self, wire: Wire, end: TensorEnd | None = None, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._wire, self._end = wire, end
        self._queue = FrameQueue(max_bytes)
        threading.Thread(target=self._run, name="tensors out", daemon=True).start()

    def send(self, frame: Frame) -> bool:
        self._wire.queued(frame)
        return self._queue.put(frame)

    def close(self) -> None:
        self._queue.close()

    def _run(self) -> None:
        reason = "it was closed"
        try:
            with _in_torch(self.close, self._wire.leave):
                while not self._queue.is_closed:
                    self._wire.send(self._queue.take(HEARTBEAT_S) or Frame(()))
        except (RuntimeError, OSError) as error:
            reason = str(error)
        finally:  # whatever it was: the queue would fill
            self._queue.close()
            if self._end is not None:
                self._end.down(reason)


class TensorReceiver:
    """Serves ``end`` on a thread until the link breaks, or ``close``."""

    def __init__(self, wire: Wire, end: TensorEnd) -> None:
        self._wire, self._end = wire, end
        self._is_closed = False
        threading.Thread(target=self._run, name="tensors in", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        reason = "it was closed"
        try:
            with _in_torch(self.close, self._wire.leave):
                while not self._is_closed:
                    frame = self._wire.receive()
                    if frame.parts or frame.ended:
                        self._end.receive(frame)
        except (RuntimeError, OSError, ValueError) as error:
            reason = str(error)
        finally:  # whatever it was: a request waits for rows as long as the link is up
            self._end.down(reason)


def _sending(store: Store, host: str, device: torch.device, shares_memory: bool) -> Wire:
    offer = shared.offer(MEET_S) if shares_memory and device.type == "cpu" else None
    store.set("offered", "" if offer is None else offer.name)
    if offer is not None:
        with closing(offer):
            if store.get("taken"):
                return offer.accept(SILENCE_S)
    return GroupWire(store, _SENDER, host, device)


def _receiving(store: Store, host: str, device: torch.device) -> Wire:
    name = store.get("offered").decode()
    reached = shared.reach(name, MEET_S) if name and shared.IS_AVAILABLE and device.type == "cpu" else None
    store.set("taken", "" if reached is None else "yes")
    if reached is not None:
        return shared.joined(reached, SILENCE_S)
    return GroupWire(store, _RECEIVER, host, device)


def _gpu_of(device: torch.device) -> str:
    """Names the GPU among those of all machines; empty for host memory."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _nccl_pair(store: Store, rank: int) -> Any:
    """A group that only aborts its communicator at an error, which then is an exception of the transfer. By default torch's
    watchdog ends the process: a lost drafter would end its target. No option of a group says so, only the environment,
    which a group reads when it is made."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _MEET
    with _environment:
        before = os.environ.get(_ON_ERROR)
        os.environ[_ON_ERROR] = "2"  # CleanUpOnly
        try:
            return nccl(store, rank, 2, options)
        finally:
            os.environ.pop(_ON_ERROR)
            os.environ |= {} if before is None else {_ON_ERROR: before}


def _client(address: str) -> Store:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=_MEET)
